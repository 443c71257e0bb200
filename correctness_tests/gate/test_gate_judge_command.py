"""A judge is run with its own settings, and its report is put with the base's."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from correctness_tests.support.gate_fakes import SIDES, Script
from correctness_tests.support.gated_suite import git
from correctness_tests.support.judged import tree
from tinyllama.harness.gate import comparison, judge
from tinyllama.harness.gate.judged import changed_files, shadowing
from tinyllama.harness.gate.pair import BASE, Tree
from tinyllama.harness.gate.revision import RevisionError
from tinyllama.harness.records.verdict import Outcome


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_judge_reports_when_its_command_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int
) -> None:
    begun, report = tmp_path / "begun", tmp_path / "report"
    program = (
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"pathlib.Path({str(begun)!r}).touch()\n"
        "try:\n    time.sleep(60)\n"
        f"except KeyboardInterrupt:\n    pathlib.Path({str(report)!r}).touch()\n"
    )
    monkeypatch.setattr(judge, "_PYTEST", program)

    def interrupt() -> None:
        while not begun.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    other = threading.Thread(target=interrupt)
    other.start()
    by = judge.Judge("a judge", tmp_path, own=False)
    assert judge._ended(by, tmp_path, [], [], tmp_path) == 2, (
        "0 is no status of an interrupted gate"
    )
    other.join()
    assert report.exists()


def test_a_judge_that_is_given_no_folder_reads_its_own_conftests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the current folder are the candidate's."""
    judges, root = tmp_path / "judge", tmp_path / "tree"
    for folder in (judges, root):
        folder.mkdir()
        (folder / "pytest.ini").touch()
        (folder / "conftest.py").write_text(
            f"import pathlib; pathlib.Path({str(tmp_path)!r}, '{folder.name} read').touch()\n"
        )
    monkeypatch.chdir(root)
    judge._ended(judge.Judge("a judge", judges, own=False), root, ["-pno:cacheprovider"], [], root)
    assert sorted(path.name for path in tmp_path.glob("* read")) == ["judge read"]


@pytest.mark.parametrize(
    ("outcomes", "status", "by"),
    [(["JUDGE CHANGED", "SAME"], 19, ["new", "this tree"]), (["SAME"], 0, ["new"])],
    ids=["changed", "readable"],
)
def test_a_second_verdict_is_put_into_the_report_where_the_first_cannot_be_relied_on(
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    outcomes: list[str],
    status: int,
    by: list[str],
) -> None:
    judges: list[str] = []

    def ended(one: judge.Judge, root: Path, arguments: list[str], *more: object) -> int:
        report = Path(arguments[-1].removeprefix("--gate-json="))
        verdict = {"name": "candidate", "outcome": outcomes[len(judges)]}
        report.write_text(json.dumps({"status": 0, "verdicts": [verdict]}))
        judges.append(one.label)
        return status if len(judges) == 1 else 0

    monkeypatch.setattr(judge, "_ended", ended)
    report = tmp_path / "out.json"
    given = ["--junitxml=x.xml", f"--gate-json={report}"]
    assert judge.run(repository, given, ["perf_tests"], ["new"], None, report) == status
    assert judges == by
    assert ('"by_the_candidate"' in report.read_text()) is (len(by) == 2)


# -- trees that change meanwhile ------------------------------------------------------------------


@pytest.mark.parametrize("launch", [1, 3, 1000], ids=["first", "third", "last"])
@pytest.mark.parametrize("side", SIDES)
def test_a_tree_that_is_written_to_is_tampered_with(side: str, launch: int) -> None:
    script = Script("a", "b")
    asked: list[str] = []

    def contents(of: Tree) -> str:
        asked.append(of.name)
        late = launch == 1000 and script.launches > 3 and not script.session.undecided()
        return str(of.name == side and (script.launches >= launch or late))

    found = script.run(contents=contents)
    assert found[side].outcome is Outcome.TAMPERED
    assert script.status == 20
    assert len(asked) >= 4


def test_the_state_of_a_tree_is_of_every_file_and_of_bytecode(tmp_path: Path) -> None:
    files = tree(tmp_path / "base", {"a.py": "x = 1\n", "__pycache__/a.pyc": "1", "b.so": "1"})
    one = Tree(BASE, tmp_path / "base", "python", "main", tmp_path / "caches")
    before = comparison.state(one, tmp_path)
    assert comparison.state(one, tmp_path) == before
    for path in files.values():
        text = path.read_text()
        path.write_text("other")
        assert comparison.state(one, tmp_path) != before
        path.write_text(text)
    tree(tmp_path / "base", {"new.json": "{}"})
    assert comparison.state(one, tmp_path) != before


# -- what could speak in the place of a judge ---------------------------------------------------


@pytest.mark.parametrize("text", ['{"status": 10, "verdicts": []}', "", None])
def test_a_judge_that_ends_with_0_counts_by_its_report_alone(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    """As where a plugin of pytest, or a variable of Python, changes the status of a process."""
    report = tmp_path / "out.json"

    def ended(*more: object) -> int:
        if text is not None:
            report.write_text(text)
        return 0

    monkeypatch.setattr(judge, "_ended", ended)
    given = [f"--gate-json={report}"]
    assert judge.run(repository, given, ["perf_tests"], ["new"], None, report) == 15


def test_a_plugin_of_pytest_that_the_tree_has_is_not_loaded_by_its_judge(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a package that is installed as a link to the tree."""
    installed = tmp_path / "installed"
    tree(
        installed,
        {
            "one-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: one\nVersion: 1\n",
            "one-1.dist-info/entry_points.txt": "[pytest11]\nsays-0 = zz_one.plugin\n"
            "elsewhere = zz_other\n",
            "zz_other.py": "",
        },
    )
    tree(repository / "src", {"zz_one/__init__.py": "", "zz_one/plugin.py": ""})
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.syspath_prepend(str(repository / "src"))
    given: list[str] = []

    def ended(one: judge.Judge, root: Path, arguments: list[str], *more: object) -> int:
        given[:] = arguments
        return 2

    monkeypatch.setattr(judge, "_ended", ended)
    judge.run(repository, [], [], ["new"], None, tmp_path / "out.json")
    assert given == ["-pno:says-0"]


def test_a_folder_of_the_tree_that_is_judged_is_no_judge(repository: Path) -> None:
    inside = {f"main/{judge.ABLE}": "# the candidate's\n"}
    tree(repository, inside)
    with judge.chosen(repository, ["new"], str(repository / "main")) as by:
        assert by.folder == repository / "main", "a checkout beside, which git does not track"
    git("add", "--all")
    with (
        pytest.raises(RevisionError, match="git tracks that folder in the judged tree"),
        judge.chosen(repository, ["new"], "main"),
    ):
        pass


def test_a_module_in_the_place_of_another_judges() -> None:
    before = ["types.py", "torchlike/__init__.py", "kernels/one.py", "triton/notes.md"]
    before += ["triton/__init__.pyi"]  # neither of these is a package
    after = (
        "sitecustomize.py",
        "src/usercustomize.py",
        "secrets.py",
        "types.py",
        "torch/__init__.py",
        "torch/inside/more.py",
        "src/numpy/__init__.py",
        "scipy.so",
        "triton/__init__.py",
        "sympy/__init__.abi3.so",
        "sympy/more.py",
    )
    not_so = (
        "kernels/one.py",
        "kernels/torch.py",
        "json/data.txt",
        "io.md",
        "torchlike/__init__.py",
        "own.py",
        "src/own/secrets.py",
        "pytest/__init__.pyi",
    )
    loaded = {"torch", "numpy", "scipy", "torchlike", "pytest", "triton", "sympy"}
    assert shadowing({*after, *not_so}, loaded, before) == {*after}


def test_bytecode_that_git_tracks_judges(tmp_path: Path) -> None:
    name = "kernels/__pycache__/one.cpython-311.pyc"
    (change,) = changed_files({}, tree(tmp_path, {name: "1"}))
    assert change.name == name
