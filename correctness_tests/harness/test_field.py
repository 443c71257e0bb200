"""The record of released bugs agrees with its cases; ``field.run`` can fail."""

import json
from dataclasses import replace

import pytest

from field import run as field
from tinyllama.harness.check.run import CHECKS

DECLARED = field.declared()
CASES, KNOWN, NEWEST = DECLARED.cases, DECLARED.known, DECLARED.newest
RECORD = json.loads(field.RECORD.read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.library}-{case.issue}")
def test_a_case_is_well_formed(case: field.Case) -> None:
    assert set(case.found_by) <= set(CHECKS)
    assert (field.ROOT / "field" / field.FOLDERS[case.library] / f"{case.op}.py").is_file()
    assert NEWEST[case.library]
    assert case.issue
    assert case.fixed != case.buggy


@pytest.mark.parametrize("kernel", DECLARED.kernels, ids=lambda one: f"{one.library}-{one.op}")
def test_a_kernel_is_well_formed(kernel: field.Kernel) -> None:
    assert set(kernel.fails) <= set(CHECKS)
    assert kernel.why
    folder = field.FOLDERS[kernel.library]
    assert (field.ROOT / "field" / folder / f"{kernel.op}.py").is_file()
    assert (kernel.library in field.MODULES) == (kernel.release != field.HERE)


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
    case = next(case for case in CASES if case.fixed is not None and case.found_by)
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
