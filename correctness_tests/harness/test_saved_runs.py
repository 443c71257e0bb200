"""What pytest-benchmark saves and compares, in a suite of the plugin for timings."""

import json

import pytest

from correctness_tests.support.timed_suite import COMPARE, Suite, lines

pytestmark = pytest.mark.long

pytest_plugins = ["pytester"]


@pytest.mark.parametrize("value", ["", "=0001"])
def test_a_saved_run_is_in_the_table_and_the_verdict_is_ours(suite: Suite, value: str) -> None:
    assert suite.run("--record", "--benchmark-save=first").ret == 0
    assert [path.name for path in suite.pytester.path.glob(".benchmarks/*/*.json")] == [
        "0001_first.json"
    ]
    result = suite.run(COMPARE + value)
    assert result.ret == 0, result.stdout.str()
    lines(result, r"^SAME one/a")
    assert "(0001_first)" in result.stdout.str()
    suite.measure(1.2)
    assert suite.run(COMPARE + value).ret == 10


def test_readings_are_entered_under_benchmark_only(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        "import os\nos.environ.pop('PYTEST_XDIST_WORKER', None)  # it disables pytest-benchmark\n"
        "from tinyllama.bench.table import readings_clock, table"
    )
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
