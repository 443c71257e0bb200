"""The record of released bugs agrees with its cases; ``field.run`` can fail."""

import json
from dataclasses import replace

import pytest

from field import run as field
from tinyllama.harness.correct.checks import CHECKS

DECLARED = field.declared()
CASES, KNOWN, NEWEST = DECLARED.cases, DECLARED.known, DECLARED.newest
RECORD = json.loads(field.RECORD.read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.library}-{case.issue}")
def test_a_case_is_well_formed(case: field.Case) -> None:
    assert case.found_by
    assert set(case.found_by) <= set(CHECKS)
    assert (field.ROOT / "field" / field.FOLDERS[case.library] / f"{case.op}.py").is_file()
    assert NEWEST[case.library]
    assert case.issue
    assert case.fixed != case.buggy


def test_the_bugs_are_enough_and_the_set_is_large() -> None:
    assert len(CASES) >= 15
    assert len({case.library for case in CASES}) >= 4
    kernels = [(one.library, one.op) for one in CASES]
    kernels += [(one.library, one.op) for one in DECLARED.kernels]
    assert len(kernels) == len(set(kernels)) >= 24


@pytest.mark.parametrize("kernel", DECLARED.kernels, ids=lambda one: f"{one.library}-{one.op}")
def test_a_kernel_is_well_formed(kernel: field.Kernel) -> None:
    assert set(kernel.fails) <= set(CHECKS)
    assert kernel.why
    folder = field.FOLDERS[kernel.library]
    assert (field.ROOT / "field" / folder / f"{kernel.op}.py").is_file()
    assert (kernel.library in field.MODULES) == (kernel.release != field.HERE)


def test_another_fault_and_one_that_is_missed_are_told() -> None:
    kernel = field.Kernel("tutorials", "some", field.HERE, ("outputs",), "why")
    assert field.differences(kernel, {"outputs": "seen"}) == []
    assert field.differences(kernel, {"races": "seen"}) == [
        "some written here: outputs does not find what is known",
        "some written here: races fails",
    ]


def test_faults_are_wrong_or_unsafe_follow_from_none_and_name_no_folder() -> None:
    of = {"case": "c", "message": f"{field.ROOT}/a.py:3: seen", "cause": "", "traceback": ""}
    checks = [
        {"check": "one", "outcome": "failed", "rank": "unsafe", **of},
        {"check": "two", "outcome": "crashed", "rank": "contract", **of},
        {"check": "three", "outcome": "blocked", "rank": "wrong result", **of},
        {"check": "four", "outcome": "failed", "rank": "unsafe", **of, "cause": "one"},
    ]
    assert field._faults(checks, field.ROOT) == {"one": "c: a.py:3: seen"}


def test_a_release_that_was_not_checked_is_not_found_to_be_right() -> None:
    def one(check: str, outcome: str, rank: str = "", traceback: str = "") -> dict[str, str]:
        of = {"case": "", "message": "why", "cause": "", "traceback": traceback}
        return {"check": check, "outcome": outcome, "rank": rank, **of}

    wrong = "wrong result"
    fault, held = one("outputs", "failed", wrong), one("races", "passed")
    behind, refused = one("sizes", "blocked", wrong), one("autocast", "blocked", wrong, "Traceback")
    assert field._faults([held, one("captured", "unsupported")], field.ROOT) == {}
    assert field._faults([fault, behind], field.ROOT) == {"outputs": ": why"}
    for checks, names in (
        ([held, behind], "sizes"),
        ([fault, behind, refused], "autocast"),
        ([one("captured", "unsupported"), one("races", "unsupported")], "captured, races"),
    ):
        with pytest.raises(RuntimeError, match=f"^nothing is known of {names}: why$"):
            field._faults(checks, field.ROOT)


def test_what_is_known_names_checks_and_ops_that_exist() -> None:
    for known in KNOWN:
        assert known.check in CHECKS
        assert known.whose in ("library", "harness")
        assert set(known.ops) <= {case.op for case in CASES}


def test_the_record_is_of_these_cases_and_they_hold_in_it() -> None:
    assert [row["issue"] for row in RECORD["cases"]] == [case.issue for case in CASES]
    for case, row in zip(CASES, RECORD["cases"], strict=True):
        declared = json.loads(json.dumps(vars(case)))
        assert {name: row[name] for name in declared} == declared
        assert field.verdicts(case, row["found"], KNOWN, row["newest"]) == []


def test_the_record_is_of_the_other_kernels_and_they_are_as_declared() -> None:
    for kernel, row in zip(DECLARED.kernels, RECORD["kernels"], strict=True):
        declared = json.loads(json.dumps(vars(kernel)))
        assert {name: row[name] for name in declared} == declared
        assert field.differences(kernel, row["found"]) == []


def test_a_bug_that_no_check_finds_and_a_fix_that_fails_are_told() -> None:
    case = next(case for case in CASES if case.fixed is not None)
    assert case.fixed is not None
    fine = {check: "seen" for check in case.found_by}
    assert field.verdicts(case, {case.buggy: fine, case.fixed: {}}, []) == []
    unfound = field.verdicts(case, {case.buggy: {}, case.fixed: {}}, [])
    assert len(unfound) == len(case.found_by)
    unfixed = {case.buggy: fine, case.fixed: {"races": "wrong"}}
    assert field.verdicts(case, unfixed, []) == [f"{case.op} {case.fixed}: races fails"]
    excused = field.Known("races", "library", (case.op,), "why")
    assert field.verdicts(case, unfixed, [excused]) == []
    assert field.verdicts(case, unfixed, [replace(excused, ops=("another",))]) != []


def test_what_fails_in_the_newest_release_must_be_known() -> None:
    case = field.Case("some", 1, "op", buggy="1", found_by=("outputs",), bug="b", fixed="2")
    found = {"1": {"outputs": "seen"}, "2": {}, "3": {"outputs": "again", "races": "seen"}}
    expected = ["op 3: outputs fails", "op 3: races fails"]
    assert field.verdicts(case, found, [], "3") == expected
    unfixed = replace(case, fixed=None)
    races = field.Known("races", "library", ("op",), "why")
    assert field.verdicts(unfixed, found, [], "3") == expected[1:]
    assert field.verdicts(unfixed, found, [races], "3") == []


def test_a_check_that_a_case_names_may_not_be_excused_in_its_fix() -> None:
    case = next(case for case in CASES if case.fixed is not None)
    assert case.fixed is not None
    both = {check: "seen" for check in case.found_by}
    excuses = [field.Known(check, "library", (case.op,), "why") for check in case.found_by]
    assert field.verdicts(case, {case.buggy: both, case.fixed: both}, excuses) != []
