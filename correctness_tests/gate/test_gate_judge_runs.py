"""How a judge is asked, what it may not load, and what of its report is kept."""

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest

from tinyllama.harness.gate import judge
from tinyllama.harness.gate.revision import RevisionError

GREEN = {"status": 0, "verdicts": []}
UNREADABLE = {"status": 19, "verdicts": [{"name": "candidate", "outcome": "JUDGE CHANGED"}]}


class Asked:
    """What judges were asked, each of which writes the next of some reports and ends with its
    status."""

    def __init__(self, by: judge.Judge, monkeypatch: pytest.MonkeyPatch, *reports: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.chosen = Mock(return_value=nullcontext(by))
        left = iter(reports)

        def ended(*given: Any) -> int:
            self.calls.append(given)
            (path,) = (one for one in given[2] if one.startswith("--gate-json="))
            Path(path.partition("=")[2]).write_text(json.dumps(said := next(left)))
            status: int = said["status"]
            return status

        monkeypatch.setattr(judge, "chosen", self.chosen)
        monkeypatch.setattr(judge, "_ended", ended)
        monkeypatch.setattr(judge, "_plugins_of", lambda root, folder: [f"{root}-{folder}"])


@pytest.mark.parametrize("own", [True, False])
def test_a_judge_is_given_all_arguments_and_its_own_plugins(
    own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, by = Path("tree"), judge.Judge("a judge", Path("judge"), own)
    asked = Asked(by, monkeypatch, GREEN)
    assert judge.run(root, ["-k", "x"], ["perf"], ["main"], "named", None, ["one", "two"]) == 0
    assert asked.chosen.mock_calls == [call(root, ["main"], "named")]
    ((*who, arguments, paths, folder),) = asked.calls
    assert who == [by, root]
    report = f"--gate-json={folder}/gate.json"
    assert arguments == ["-k", "x", report, *(["-pone", "-ptwo"] * own), "-pno:tree-judge"]
    assert paths == ["perf"]
    assert not folder.exists(), "it was of this run"


@pytest.mark.parametrize("itself", [False, True])
def test_what_a_judge_cannot_read_the_candidates_harness_judges_too_unless_it_did(
    itself: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root, report = tmp_path, tmp_path / "report.json"
    by = judge.Judge("a judge", root if itself else Path("judge"), False)
    verdicts = [{"name": "a", "outcome": "SAME"}]
    asked = Asked(by, monkeypatch, UNREADABLE, {"status": 0, "verdicts": verdicts})
    given = ["-x", f"--gate-json={report}", "--junit-xml", "a.xml", "--junitxml=b.xml"]
    assert judge.run(root, given, ["perf"], ["main"], None, report) == 19
    if itself:
        assert len(asked.calls) == 1
        return
    folder = asked.calls[0][-1]
    kept = ["-x", f"-pno:{root}-judge", f"--gate-json={folder}/second.json"]
    tree = judge.Judge("this tree", root, False)
    assert asked.calls[1] == (tree, root, kept, ["perf"], folder)
    content = {**UNREADABLE, "by_the_candidate": verdicts}
    assert report.read_text() == json.dumps(content, indent=1) + "\n"
    assert "decides nothing" in capsys.readouterr().out


@pytest.mark.parametrize("second", [None, "{", "{}"])
def test_a_second_report_that_is_none_adds_nothing(second: str | None, tmp_path: Path) -> None:
    report, other = tmp_path / "report.json", tmp_path / "second.json"
    report.write_text(json.dumps(UNREADABLE))
    if second is not None:
        other.write_text(second)
    judge._add(report, other)
    assert json.loads(report.read_text()) == {**UNREADABLE, "by_the_candidate": []}


@pytest.mark.parametrize(
    ("waits", "status", "killed"),
    [
        ([7], 7, False),
        ([0], 2, False),
        ([subprocess.TimeoutExpired("judge", 1), -9], -9, True),
        ([KeyboardInterrupt(), 0], 2, True),
    ],
)
def test_a_judge_that_is_interrupted_may_report_for_a_while_and_never_ends_with_0(
    waits: list[Any], status: int, killed: bool
) -> None:
    process = Mock(wait=Mock(side_effect=waits))
    assert judge._interrupted(process) == status
    process.send_signal.assert_called_once_with(judge.signal.SIGINT)
    assert process.wait.mock_calls[0] == call(judge.REPORTED)
    assert process.kill.called is killed


def test_plugins_of_the_tree_are_those_that_its_judge_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, folder = tmp_path / "tree", tmp_path / "judge"
    (folder / "package").mkdir(parents=True)
    (folder / "module.py").touch()
    values = ["first.plugin", "elsewhere", "package.x", "module:x", "last.y:z"]
    points = [SimpleNamespace(value=one, name=f"{one[0]}-plugin") for one in values]
    inside, outside = str(root / "src"), str(tmp_path / "site")
    places = {one: [outside, inside] for one in ("first", "last", "package", "module")}
    monkeypatch.setattr(judge.metadata, "entry_points", lambda group: {"pytest11": points}[group])
    monkeypatch.setattr(judge, "_places", {**places, "elsewhere": [outside]}.__getitem__)
    assert judge._plugins_of(root, folder) == ["f-plugin", "l-plugin"]


def test_a_module_is_where_its_folders_and_its_file_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "zz_package").mkdir()
    (tmp_path / "zz_package/__init__.py").touch()
    (tmp_path / "zz_spread").mkdir()
    (tmp_path / "zz_alone.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    package = tmp_path / "zz_package"
    assert judge._places("zz_package") == [str(package), str(package / "__init__.py")]
    assert judge._places("zz_spread") == [str(tmp_path / "zz_spread")]
    assert judge._places("zz_alone") == [str(tmp_path / "zz_alone.py")]
    assert judge._places("zz_nowhere") == []


def test_a_harness_of_another_place_may_judge_and_for_two_interpreters_the_trees_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge, "_installed", lambda: "tinyllama 1")
    here = [str(judge.HARNESS), "tinyllama 1"]
    assert judge.labels(tmp_path, False) == here
    assert judge.labels(tmp_path, True) == [*here, "this tree"]
    assert judge.labels(judge.HARNESS, True) == ["this tree"]
    assert judge.labels(judge.HARNESS, False) == []


def test_the_last_file_that_git_tracks_in_a_judges_folder_is_one_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / "a.py", tmp_path / "inside/b.py"]
    (tmp_path / "inside").mkdir()
    monkeypatch.setattr(judge, "tracked_files", lambda root: files)
    with (
        pytest.raises(RevisionError, match="git tracks that folder"),
        judge.chosen(tmp_path, [], str(tmp_path / "inside")),
    ):
        pass
