"""The plugin for timings: what is compared is what is expected, and no way around it is green.

Each test runs a suite of two groups whose timings come from a file.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from correctness_tests.support.commands import ENVIRONMENT
from correctness_tests.support.timed_suite import COMPARE, SUITE, Suite, ends, lines
from tinyllama.harness.records import results

pytest_plugins = ["pytester"]


Change = Callable[[Suite], None]
CURVE = """CurveEntry(
                name=name, workload="w", contender="c", precision="fp32", steps=2, window=1,
                every=1, losses=[3.0, 2.0],
            )"""


# -- the verdict ------------------------------------------------------------------------------


@pytest.mark.long
def test_without_a_baseline_it_is_12_and_recorded_and_then_0(suite: Suite) -> None:
    ends(
        suite.run(COMPARE),
        12,
        "NO BASELINE one: ",
        "recorded .*one.json$",
        r"exit status 12; .*NO BASELINE",
    )
    assert [(r["group"], r["complete"]) for r in suite.records()] == [("one", True), ("two", True)]
    ends(suite.run(COMPARE), 0, r"SAME one/a: seconds 1\.000 times")
    assert len(suite.records()) == 4


@pytest.mark.long
def test_a_slowdown_is_10_and_never_becomes_the_baseline(baseline: Suite) -> None:
    baseline.measure(1.2)
    for _ in range(2):
        ends(
            baseline.run(COMPARE),
            10,
            r"SLOWER one/a: seconds 1\.200 times",
            "not recorded one: no baseline",
        )
        assert len(baseline.records()) == 2
    result = baseline.run(COMPARE, "--record")
    assert result.ret == 10
    assert sorted(r["complete"] for r in baseline.records()) == [False, False, True, True]
    assert baseline.run(COMPARE).ret == 10
    assert baseline.run("--record").ret == 0, "--record alone accepts a slowdown"
    assert baseline.run(COMPARE).ret == 0


def figures(seconds: Any = 1.0, names: str = "ab") -> Change:
    return lambda suite: suite.measure(seconds, names)


def statement(text: str) -> Change:
    return lambda suite: suite.right(text)


UNCHANGED, SKIPPED = figures(), r"MISSING test_timed.py::test_it_is_right\[one\]: SKIPPED: "
CHANGES: dict[str, tuple[Change, list[str], int, str]] = {
    "a speed-up": (figures(0.5), [], 0, "FASTER one/a"),
    "a new benchmark": (figures(names="abc"), [], 12, "NO BASELINE one/c: seconds is new"),
    "a missing benchmark": (figures(names="a"), [], 15, "MISSING one/b: in the baseline, not in"),
    **{
        f"{seconds} seconds": (figures(seconds), [], 1, "ValueError: one/a: ")
        for seconds in (float("nan"), 0, -1.0, "fast", None)
    },
    "a skip": (statement("pytest.skip('no such card')"), [], 15, SKIPPED + "no such card"),
    "an expected failure": (statement("pytest.xfail('known')"), [], 15, SKIPPED + "xfail"),
    **{
        " ".join(options): (UNCHANGED, options, 15, "^MISSING ")
        for options in (
            ["-k", "fast"],
            ["-k", "nothing"],
            ["--deselect", "test_timed.py::test_it_is_right"],
            ["--benchmark-only"],
        )
    },
}


@pytest.mark.parametrize(("change", "options", "status", "line"), CHANGES.values(), ids=CHANGES)
def test_a_change_has_its_status_and_only_a_good_run_becomes_the_baseline(
    baseline: Suite, change: Change, options: list[str], status: int, line: str
) -> None:
    change(baseline)
    ends(baseline.run(COMPARE, *options), status, line)
    complete = sum(record["complete"] for record in baseline.records())
    assert complete == (2 if status in (1, 15) else 4)


@pytest.mark.long
def test_the_short_set_is_measured_and_expected_alone(suite: Suite) -> None:
    with open("conftest.py", "a") as file:
        file.write("\n\ndef pytest_tinyllama_short_groups(config):\n    return ['one']\n")
    assert suite.run("--record", "--groups", "short").ret == 0
    assert [record["group"] for record in suite.records()] == ["one"]
    left = suite.run("--record", "--groups", "short", "-k", "nothing")
    ends(left, 15, "MISSING one: expected, and not measured to its end")


@pytest.mark.parametrize(
    ("standings", "outcome"),
    [
        ("NOT_APPLICABLE", "skipped"),
        ("MET NOT_APPLICABLE", "passed"),
        ("MET MISSED", "failed"),
    ],
)
def test_bars_are_listed_and_none_that_applies_is_a_skip(
    suite: Suite, standings: str, outcome: str
) -> None:
    bars = [f"Bar(Standing.{name}, 'a bar')" for name in standings.split()]
    suite.target(
        "from tinyllama.harness.records.targets import Bar, Standing; "
        f"recording.hold([{', '.join(bars)}])"
    )
    result = suite.run("--record", "-rs")
    said = [name.replace("_", " ") for name in standings.split()]
    lines(result, *(f"^{name} one: a bar$" for name in said))
    assert result.parseoutcomes().get(outcome, 0) >= 2
    assert (result.ret == 0) is (outcome != "failed")
    missed = ["a bar"] * said.count("MISSED")
    assert [(r["complete"], r["missed"]) for r in suite.records()] == [(True, missed)] * 2
    if outcome == "skipped":
        lines(result, "none of 1 bars of one applies on this device")


@pytest.mark.parametrize("statement", ["raise ValueError('no entry')", "pytest.skip('not here')"])
def test_a_target_that_cannot_be_told_leaves_no_whole_record(suite: Suite, statement: str) -> None:
    suite.target(statement)
    assert suite.run("--record").ret != 0
    assert [(r["complete"], r["missed"]) for r in suite.records()] == [(False, [])] * 2


@pytest.mark.long
def test_what_its_tests_hold_needs_nothing_to_compare(suite: Suite) -> None:
    path = Path("figures.json")
    path.write_text(json.dumps({"one": {}}))
    suite.expect("one")
    assert suite.run("--record").ret == 15
    path.write_text(json.dumps({"one": {"one/v1": {}}}))
    suite.pytester.makepyfile(
        test_timed=SUITE.replace("OpEntry(name=name, **OP, **values)", CURVE).replace(
            "{right}", "pass"
        )
    )
    ends(suite.run("--record"), 0, "SAME one: held by its tests")
    assert sorted(r["complete"] for r in suite.records()) == [False, True]


def test_every_comparison_is_a_test_case_of_junit(baseline: Suite) -> None:
    baseline.measure(1.2)
    result = baseline.run(COMPARE, "--junitxml", "out.xml")
    result.assert_outcomes(passed=4 + 2, failed=2)
    suite = ElementTree.parse("out.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures")) == ("8", "2")
    cases = {f"{case.get('classname')} {case.get('name')}": case for case in suite}
    failure = cases["compare.one one/a"].find("failure")
    assert failure is not None
    assert "SLOWER one/a: seconds 1.200 times" in failure.get("message", "")
    assert cases["compare.one one/b"].find("failure") is None


# -- missing and new --------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("option", [COMPARE, "--record"])
def test_a_missing_group_is_15(suite: Suite, option: str) -> None:
    suite.measure(groups="one")
    for _ in range(2):
        ends(suite.run(option), 15, "MISSING two: expected, and not measured to its end")


@pytest.mark.long
@pytest.mark.parametrize("option", [COMPARE, "--record"])
def test_a_run_that_expects_or_collects_nothing_is_15(suite: Suite, option: str) -> None:
    suite.measure(groups="")
    assert suite.run(option, "-k", "nothing").ret == 15
    suite.expect()
    ends(suite.run(option), 15, "MISSING groups: no groups are declared")


@pytest.mark.long
def test_a_group_nobody_expects_is_an_error(suite: Suite) -> None:
    suite.expect("one")
    assert suite.run(COMPARE).ret == 1
    assert suite.run().ret == 0


def test_tests_chosen_by_name_may_not_be_all(baseline: Suite) -> None:
    args = ["test_timed.py::test_it_is_right", "test_timed.py::test_it_is_fast", "--device", "cpu"]
    result = baseline.pytester.runpytest_inprocess(*args, COMPARE)
    assert result.ret == 15
    lines(result, "chosen one by one, perhaps not all: choose with --groups")


@pytest.mark.long
def test_slow_benchmarks_may_be_left_out_but_not_what_they_measured(baseline: Suite) -> None:
    text = Path("test_timed.py").read_text()
    Path("test_timed.py").write_text(
        text.replace("def test_it_is_fast", "@pytest.mark.slow('an hour')\ndef test_it_is_fast")
    )
    assert baseline.run(COMPARE).ret == 0
    assert baseline.run(COMPARE, "-m", "slow").ret == 15
    baseline.measure(names="a")
    assert baseline.run(COMPARE).ret == 15


# -- failures and crashes ---------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("options", [[COMPARE], ["--record", "-x"]], ids=" ".join)
def test_timings_of_a_failed_test_are_no_baseline(suite: Suite, options: list[str]) -> None:
    suite.right("assert group.record.group != 'two'")
    assert suite.run(*options).ret == pytest.ExitCode.TESTS_FAILED
    assert [r["group"] for r in suite.records() if r["complete"]] == ["one"]
    suite.right()
    ends(suite.run(COMPARE), 12, "NO BASELINE two")


def test_a_failure_keeps_its_status_and_the_verdict_is_said(baseline: Suite) -> None:
    baseline.measure(1.2)
    baseline.right("assert group.record.group != 'two'")
    ends(
        baseline.run(COMPARE),
        pytest.ExitCode.TESTS_FAILED,
        "SLOWER one/a",
        r"exit status 1; the worst verdict is SLOWER \(10\)",
    )


def test_an_error_while_tearing_down_the_last_test_counts(suite: Suite) -> None:
    text = Path("test_timed.py").read_text() + (
        "\n@pytest.fixture(scope='module')\ndef broken(group):\n    yield\n"
        "    assert group.record.group != 'two'\n"
        "\ndef test_last(group, broken): pass\n"
    )
    Path("test_timed.py").write_text(text)
    assert suite.run(COMPARE).ret == pytest.ExitCode.TESTS_FAILED
    assert [r["group"] for r in suite.records() if r["complete"]] == ["one"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("statement", "status"),
    [("raise KeyboardInterrupt", 2), ("pytest.exit('now', returncode=0)", 15)],
)
def test_an_interrupted_run_keeps_what_was_finished_only(
    suite: Suite, statement: str, status: int
) -> None:
    suite.right(f"\n    if group.record.group == 'two': {statement}")
    result = suite.run(COMPARE)
    assert result.ret == status
    assert [(r["group"], r["complete"]) for r in suite.records()] == [("one", True)]
    lines(result, "MISSING two: expected, and not measured to its end")


@pytest.mark.long
def test_a_crash_loses_only_the_group_that_was_measured(suite: Suite) -> None:
    suite.right("\n    if group.record.group == 'two': os._exit(9)")
    argv = ["-m", "pytest", "test_timed.py", "--device", "cpu", "--record"]
    done = subprocess.run([sys.executable, *argv], env=ENVIRONMENT, check=False)
    assert done.returncode == 9
    assert [(r["group"], r["complete"]) for r in suite.records()] == [("one", True)]


@pytest.mark.long
def test_a_record_that_cannot_be_saved_is_15(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(results, "save", full)
    for option in (COMPARE, "--record"):
        ends(suite.run(option), 15, "MISSING one: it could not be recorded: no space left")


@pytest.mark.long
@pytest.mark.parametrize("reasons", [["another process"], [None, "throttled"]])
def test_a_disturbed_group_is_14_and_no_baseline(suite: Suite, reasons: list[str | None]) -> None:
    for option in (COMPARE, "--record"):
        suite.disturb(list(reasons))
        ends(suite.run(option, "--groups", "one"), 14, f"BUSY one: {reasons[-1]}")
    assert not any(record["complete"] for record in suite.records())
    suite.disturb(list(reasons))
    ends(suite.run(), 0, f"BUSY one: {reasons[-1]}")
