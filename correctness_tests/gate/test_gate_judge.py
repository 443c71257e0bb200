"""What judges is never the candidate's: which harness is chosen, what a candidate changed of what
judges, and whose references and limits count."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from correctness_tests.support.gate_fakes import Script, died
from correctness_tests.support.gated_suite import GatedSuite, git
from correctness_tests.support.judged import DECISION, tree
from tinyllama.harness import Case, Op
from tinyllama.harness.gate import judge
from tinyllama.harness.gate.accepted import load
from tinyllama.harness.gate.judged import Change, changed_files, declarations
from tinyllama.harness.gate.pair import BASE, CANDIDATE
from tinyllama.harness.gate.revision import RevisionError
from tinyllama.harness.records.verdict import Outcome
from tinyllama.ops import OPS

pytest_plugins = ["pytester"]

JUDGING = {
    DECISION: "LOOKS = (1,)\n",
    "tinyllama/harness/check/compare.py": "SLACK = 1e9\n",
    "tinyllama/harness/machine/worker.py": "x = 1\n",
    "conftest.py": "import os\n",
    "kernels/conftest.py": "import os\n",
    "pytest.ini": "[pytest]\naddopts = -q\n",
    ".pytest.toml": '[pytest]\naddopts = ["-q"]\n',  # which pytest 9 reads before pytest.ini
    "pyproject.toml": "[tool.tinyllama]\nslowdowns = { device_seconds = 9.0 }\n",
    "kernels/pyproject.toml": '[tool.tinyllama]\ngroups = ["one"]\n',
    "one/pyproject.toml": '[tool.tinyllama.lanes]\nnightly = ["one"]\n',
    ".github/workflows/gate.yml": "jobs: {}\n",
    ".ci/run": "pytest\n",
    "setup.cfg": "[tool:pytest]\n",
    "tinyllama/suites/a.py": "x = 1\n",
}


def edited(op: Op, **fields: object) -> Op:
    one = copy(op)
    vars(one).update(fields)
    return one


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


# -- which harness ------------------------------------------------------------------------------


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


@pytest.mark.long
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
