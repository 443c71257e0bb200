"""What pytest-benchmark saves and compares, in a suite of the plugin for timings."""

import json
from pathlib import Path

import pytest

from correctness_tests.support.timed_suite import COMPARE, Suite, lines

pytestmark = pytest.mark.long

pytest_plugins = ["pytester"]

FAIL = "--benchmark-compare-fail"


def stored(path: Path) -> list[Path]:
    return sorted(path.glob(".benchmarks/*/*.json"))


@pytest.fixture
def saved(suite: Suite) -> Suite:
    """A suite with a baseline, and a run that pytest-benchmark saved."""
    suite.monkeypatch.chdir(suite.pytester.path)
    assert suite.run("--record", "--benchmark-save=first").ret == 0
    assert [path.name for path in stored(suite.pytester.path)] == ["0001_first.json"]
    return suite


@pytest.mark.parametrize("value", ["", "=0001", "=0001_first"])
def test_a_saved_run_is_in_the_table_and_the_verdict_is_ours(saved: Suite, value: str) -> None:
    result = saved.run(COMPARE + value)
    assert result.ret == 0, result.stdout.str()
    lines(result, r"^SAME one/a", r"test_it_is_fast\[one\] \(0001_first\)", r"\[one\] \(NOW\)")
    lines(result, "^2 benchmarks compared with saved runs$")
    saved.measure(1.2)
    assert saved.run(COMPARE + value).ret == 10


def test_what_a_saved_run_has_not_is_said(saved: Suite) -> None:
    (path,) = stored(saved.pytester.path)
    run = json.loads(path.read_text())
    run["benchmarks"][0]["fullname"] = "test_timed.py::test_of_before"
    path.write_text(json.dumps(run))
    lines(
        saved.run(COMPARE + "=0001"),
        r"^1 benchmarks compared with saved runs; 1 not saved, such as .*::test_it_is_fast\[one\]; "
        r"1 saved and not measured, such as test_timed.py::test_of_before$",
    )


def test_thresholds_hold_and_the_summary_says_what_they_miss(saved: Suite) -> None:
    within = saved.run(COMPARE, FAIL, "min:1000", "mean:1000")
    assert within.ret == 0
    lines(within, "^--benchmark-compare-fail compares one figure .* new or missing")
    (path,) = stored(saved.pytester.path)
    run = json.loads(path.read_text())
    for benchmark in run["benchmarks"]:
        benchmark["stats"]["min"] = 1e-12
    path.write_text(json.dumps(run))
    beyond = saved.pytester.runpytest_subprocess(
        "test_timed.py", "--device", "cpu", COMPARE, f"{FAIL}=min:5%"
    )
    assert beyond.ret == 1
    lines(beyond, "^SAME one/a", "Performance has regressed", "test_it_is_fast.*'min' has failed")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([COMPARE + "=0002"], "--benchmark-compare '0002': no saved run is found in "),
        ([COMPARE + "="], "--benchmark-compare '' names no saved run"),
        ([COMPARE, "test_timed.py"], "names no saved run: give a number such as 0001, or no value"),
        ([COMPARE, "."], "--benchmark-compare '.' names no saved run"),
        ([COMPARE + "=a/b/c"], "--benchmark-compare 'a/b/c' names no saved run"),
        ([f"{FAIL}=min:5%"], f"{FAIL} goes with --benchmark-compare: add it"),
        ([COMPARE, f"{FAIL}=min:5%", f"{FAIL}=mean:9%"], f"{FAIL} is given 2 times"),
        ([COMPARE, "--benchmark-storage=none", f"{FAIL}=min:5%"], f"{FAIL}: no saved run is found"),
    ],
)
def test_what_would_compare_nothing_is_refused_before_anything_runs(
    saved: Suite, args: list[str], message: str
) -> None:
    result = saved.run(*args)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    lines(result, message.replace("(", r"\("))
    assert "passed" not in result.stdout.str()


def test_readings_are_entered_under_benchmark_only(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Under it pytest-benchmark would disable itself in the run that this test starts.
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    pytester.makeconftest("from tinyllama.bench.table import readings_clock, table")
    pytester.makepyfile(
        """
        import pytest
        from tinyllama.bench.table import may_stay_empty

        def test_entered(table):
            table.enter([0.5, 0.25, 0.75], "small", plan="captured")

        @may_stay_empty
        def test_without_readings(table):
            pass

        def test_of_something_else():
            pass
        """
    )
    options = ("-Werror", "-pno:cacheprovider", "-pno:xdist", "--benchmark-only")
    result = pytester.runpytest_subprocess(*options, "--benchmark-json=result.json")
    result.assert_outcomes(passed=2, skipped=1)
    (entered,) = json.loads((pytester.path / "result.json").read_text())["benchmarks"]
    assert (entered["group"], entered["extra_info"]) == ("small", {"plan": "captured"})
    assert entered["stats"]["data"] == [0.5, 0.25, 0.75]
