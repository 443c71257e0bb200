"""What judges is never the candidate's: which harness is chosen, what a candidate changed of what
judges, and whose references and limits count."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from copy import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from correctness_tests.support.gate_fakes import SIDES, Script, died
from correctness_tests.support.gated_suite import GatedSuite, git, plain_git
from tinyllama.harness import Case, Op
from tinyllama.harness.gate import judge
from tinyllama.harness.gate.accepted import load
from tinyllama.harness.gate.judged import Change, changed_files, declarations, shadowing
from tinyllama.harness.gate.pair import BASE, CANDIDATE, Tree
from tinyllama.harness.gate.revision import RevisionError
from tinyllama.harness.gate.verified import Proof, held_to_base
from tinyllama.harness.measure.op_contender import WrongResultError
from tinyllama.harness.records.verdict import Outcome
from tinyllama.ops import OPS

pytest_plugins = ["pytester"]

DECISION = "tinyllama/harness/gate/decision.py"
JUDGING = {
    DECISION: "LOOKS = (1,)\n",
    "tinyllama/harness/correct/compare.py": "SLACK = 1e9\n",
    "tinyllama/harness/machine/worker.py": "x = 1\n",
    "conftest.py": "import os\n",
    "kernels/conftest.py": "import os\n",
    "pytest.ini": "[pytest]\naddopts = -q\n",
    ".pytest.toml": '[pytest]\naddopts = ["-q"]\n',  # which pytest 9 reads before pytest.ini
    "pyproject.toml": "[tool.tinyllama]\nslowdowns = { device_seconds = 9.0 }\n",
    ".github/workflows/gate.yml": "jobs: {}\n",
}


def edited(op: Op, **fields: object) -> Op:
    one = copy(op)
    vars(one).update(fields)
    return one


def tree(folder: Path, files: dict[str, str]) -> dict[str, Path]:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {name: folder / name for name in files}


@pytest.mark.parametrize("name", JUDGING)
def test_a_file_that_judges_and_differs_is_named(tmp_path: Path, name: str) -> None:
    base = tree(tmp_path / "base", {})
    candidate = tree(tmp_path / "candidate", {name: JUDGING[name]})
    (added,) = changed_files(base, candidate)
    (removed,) = changed_files(candidate, base)
    assert (added.name, removed.name, removed.digest) == (name, name, "removed")
    assert changed_files(candidate, candidate) == []


def test_comments_versions_and_what_ops_run_do_not_judge(tmp_path: Path) -> None:
    files = {
        DECISION: "x = 1\n",
        "pyproject.toml": '[project]\nversion = "1"\n',
        "tinyllama/harness/kernels/launch.py": "x = 1\n",
        "tinyllama/ops/rope.py": "x = 1\n",
    }
    after = {name: text.replace("1", "2") for name, text in files.items()}
    after[DECISION] = "# a comment\nx = 1\n"
    assert changed_files(tree(tmp_path / "a", files), tree(tmp_path / "b", after)) == []


def test_changes_are_accepted_by_name_and_digest(tmp_path: Path) -> None:
    path = tmp_path / "accepted.toml"
    entry = f'[[judge]]\nchanged = "{DECISION}"\ndigest = "0123"\nreason = "why"\n'
    path.write_text(entry)
    accepted = load(path, "0", device="cpu")
    assert accepted.changes == {Change(DECISION, "0123")}
    for wrong, said in ((entry + "x = 1\n", "unknown key 'x'"), ("[[judge]]\n", "changed is None")):
        path.write_text(wrong)
        with pytest.raises(ValueError, match=said):
            load(path, "0", device="cpu")


@pytest.mark.parametrize("digest", ["0123", "4567"])
def test_a_change_that_nobody_accepted_is_never_green(digest: str) -> None:
    script = Script("a")
    change = Change(DECISION, "0123")
    accepted = replace(script.setting().accepted, changes=frozenset({Change(DECISION, digest)}))
    found = script.run(changed=(change,), accepted=accepted)
    assert found["a"].outcome is Outcome.SAME
    assert script.status == (0 if digest == "0123" else 19)
    assert script.session.report()["judge_changed"] == [{"name": DECISION, "digest": "0123"}]
    if digest != "0123":
        assert f"{DECISION} (0123)" in found["judge"].text


def test_a_declaration_of_an_op_of_the_base_that_differs_is_named() -> None:
    script = Script("a")
    script.on(BASE, "declarations", {"a: reference": "1", "a: cases": "2", "old: cases": "3"})
    script.on(CANDIDATE, "declarations", {"a: reference": "4", "a: cases": "2", "new: cases": "5"})
    found = script.run()
    assert "a: reference (4); accept" in found["judge"].text
    assert script.status == 19


def test_reference_cases_slack_and_limits_are_in_the_declarations() -> None:
    op = OPS["rms_norm"]
    before = declarations([op])

    def lenient(x_BTD, weight_D, eps):  # type: ignore[no-untyped-def]
        return x_BTD

    providers = dict(op.providers)
    changed = {
        "reference": {"eager": replace(providers["eager"], call=lenient)},
        "slack of triton": {"triton": replace(providers["triton"], slack={torch.float32: 9.0})},
    }
    for part, others in changed.items():
        after = declarations([edited(op, providers={**providers, **others})])
        assert {n for n in before if before[n] != after[n]} == {f"rms_norm: {part}"}
    cases = declarations([edited(op, cases=[Case(B=1, T=1, D=8)])])
    limits = declarations([edited(op, slowdowns={"device_seconds": 9.0})])
    for part, after in (("cases", cases), ("limits", limits)):
        assert {n for n in before if before[n] != after[n]} == {f"rms_norm: {part}"}


def test_results_are_held_to_the_bases_reference_and_its_bound() -> None:
    right = Proof(1, (1.0,) * 8, 0.1, (1.0,) * 8)
    lenient = replace(right, allowed=1e9)
    (held,) = held_to_base([{"y": right}], [{"y": lenient}])
    assert held["y"].allowed == 0.1
    wrong = replace(lenient, projections=(1.4, 0.6) * 4)
    for given, said in (({"y": wrong}, "from the base's reference"), ({}, "does not")):
        with pytest.raises(WrongResultError, match=said):
            held_to_base([{"y": right}], [given])
    script = Script("a")
    script.on(CANDIDATE, "verify", [{"y": wrong}])
    assert script.run()["a"].outcome is Outcome.WRONG_RESULT


# -- which harness ------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``old`` has a harness that can judge no other tree, ``new`` one that can."""
    plain_git(monkeypatch)
    root = tmp_path / "tree"
    for tag, name in (("old", DECISION), ("new", judge.ABLE)):
        tree(root, {name: f"# {tag}\n"})
        monkeypatch.chdir(root)
        git("init", "--quiet", "--initial-branch=main")
        git("add", "--all")
        git("commit", "--quiet", f"--message={tag}")
        git("tag", tag)
    (root / judge.ABLE).write_text("# the candidate's\n")
    return root


def test_the_bases_harness_judges(repository: Path) -> None:
    with judge.chosen(repository, ["new"], None) as by:
        assert (by.folder / judge.ABLE).read_text() == "# new\n"
        assert by.label == "new"
        assert not by.own
    assert not by.folder.exists()
    with judge.chosen(repository, ["old"], "new") as by:
        assert (by.folder / judge.ABLE).read_text() == "# new\n"


def test_a_base_that_cannot_judge_leaves_the_candidates_own(repository: Path) -> None:
    with judge.chosen(repository, ["old"], None) as by:
        assert by.folder == repository
    with (
        pytest.raises(RevisionError, match="name a newer one"),
        judge.chosen(repository, [], "old"),
    ):
        pass


def test_the_installed_harness_judges_other_repositories(repository: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with judge.chosen(other, ["new"], None) as by:
        assert (by.folder, by.own) == (judge.HARNESS, True)
    with judge.chosen(other, ["new"], str(repository)) as by:
        assert (by.folder, by.own) == (repository, True)
    for name in ("nowhere", str(other)):
        with pytest.raises(RevisionError), judge.chosen(other, ["new"], name):
            pass


def test_a_harness_that_the_candidate_adds_to_another_repository_does_not_judge(
    repository: Path,
) -> None:
    git("rm", "-r", "--quiet", "--cached", "tinyllama")
    Path("kernels.py").write_text("")
    git("add", "kernels.py")
    git("commit", "--quiet", "--message=kernels")
    assert (repository / judge.ABLE).is_file()
    with judge.chosen(repository, ["HEAD"], None) as by:
        assert (by.folder, by.own) == (judge.HARNESS, True)
    with judge.chosen(repository, ["new"], None) as by:
        assert not by.own


def test_what_judges_itself_is_never_green(
    gated: GatedSuite, monkeypatch: pytest.MonkeyPatch
) -> None:
    for one in "ab":
        gated.script.alike(one)
    assert gated.run().ret == 0
    monkeypatch.setattr(judge, "HARNESS", gated.path.resolve())
    status, cases = gated.cases()
    assert status == 19
    assert "is the candidate's own harness" in str(cases["main~1 judge"])


def test_what_the_base_cannot_read_is_judged_by_both_and_is_not_green() -> None:
    """A harness that changed, and a candidate that its base's instrument cannot start."""
    script = Script("a")
    script.on(CANDIDATE, "make", died())
    found = script.run(changed=(Change(DECISION, "0123"),))
    assert found[CANDIDATE].outcome is Outcome.JUDGE_CHANGED
    assert script.status == 19


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


@pytest.mark.parametrize("installed", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_a_judge_is_run_with_its_own_settings_and_without_the_tree_that_it_judges(
    own: bool, installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """own: the tree has no harness, so pytest reads none of its settings either."""
    begin = Mock(return_value=SimpleNamespace(wait=lambda: 7))
    monkeypatch.setattr(judge.subprocess, "Popen", begin)
    root, elsewhere = tmp_path / "tree", tmp_path / "elsewhere"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([f"{root}/inside", str(elsewhere)]))
    folder = judge.HARNESS if installed else tmp_path / "judge"
    by = judge.Judge("a judge", folder, own=own)
    assert judge._ended(by, root, ["--last"], ["perf", "more"], tmp_path) == 7
    begin.assert_called_once()
    (words,), env = begin.call_args.args, begin.call_args.kwargs["env"]
    settings = tmp_path if own else folder
    where = ["--noconftest", str(tmp_path)] if own else [f"{folder}/perf", f"{folder}/more"]
    assert words[3:] == [
        *(str(folder), str(root), "-c", f"{settings}/pytest.ini"),
        *(f"--rootdir={settings}", f"--tree={root}", "--judge=a judge", *where, "--last"),
    ]
    assert (tmp_path / "pytest.ini").exists() is own
    paths = [str(elsewhere)] if own and installed else [str(folder), str(elsewhere)]
    assert env["PYTHONPATH"].split(os.pathsep) == paths


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


def test_options_are_left_out_with_their_values() -> None:
    given = ["-k", "one", "--gate-json", "x", "-x", "--junitxml=y", "--gate-json=z", "--junitxml2"]
    kept = judge._without(given, ("--gate-json", "--junitxml"))
    assert kept == ["-k", "one", "-x", "--junitxml2"]


def test_what_is_inside_a_tree(tmp_path: Path) -> None:
    assert judge._inside(tmp_path, tmp_path)
    assert judge._inside(tmp_path / "a" / ".." / "b", tmp_path)
    assert not judge._inside(tmp_path.parent, tmp_path)
    assert not judge._inside(tmp_path / ".." / "other", tmp_path)


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


def test_variables_of_python_that_lose_a_status_are_not_a_judges(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("PYTHONINSPECT", "PYTHONOPTIMIZE", "PYTHONUTF8"):
        monkeypatch.setenv(name, "1")
    assert {n for n in judge._environment() if n.startswith("PYTHON")} & {
        "PYTHONINSPECT",
        "PYTHONOPTIMIZE",
        "PYTHONUTF8",
    } == {"PYTHONUTF8"}


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
    before = {"types.py": 0, "torchlike/__init__.py": 0, "kernels/one.py": 0}
    after = (
        "sitecustomize.py",
        "src/usercustomize.py",
        "secrets.py",
        "types.py",
        "torch/__init__.py",
        "torch/inside/more.py",
        "src/numpy/__init__.py",
        "scipy.so",
    )
    not_so = (
        "kernels/one.py",
        "kernels/torch.py",
        "json/data.txt",
        "io.md",
        "torchlike/__init__.py",
        "own.py",
        "src/own/secrets.py",
    )
    loaded = {"torch", "numpy", "scipy", "torchlike", "pytest"}
    assert shadowing({*after, *not_so}, loaded, before) == {*after}


def test_bytecode_that_git_tracks_judges(tmp_path: Path) -> None:
    name = "kernels/__pycache__/one.cpython-311.pyc"
    (change,) = changed_files({}, tree(tmp_path, {name: "1"}))
    assert change.name == name
