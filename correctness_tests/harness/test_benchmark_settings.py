"""The plugin for timings under other settings: devices, versions, commits, options."""

import gc
import json
import re
from pathlib import Path
from typing import Any

import pytest

from correctness_tests.support.timed_suite import COMPARE, Suite, ends, lines

pytest_plugins = ["pytester"]


# -- other settings ---------------------------------------------------------------------------


def stored_elsewhere(suite: Suite, **fields: Any) -> None:
    for path in suite.paths():
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.long
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"versions": {"torch": "1.0"}}, "other versions: .*torch 1.0 -> "),
        ({"device": "another card"}, "other devices: another card; this is "),
    ],
)
def test_other_settings_are_13_never_compared_and_never_overwritten(
    baseline: Suite, fields: dict[str, Any], text: str
) -> None:
    stored_elsewhere(baseline, **fields)
    before = {path: path.read_bytes() for path in baseline.paths()}
    baseline.measure(9.0)
    ends(baseline.run(COMPARE), 13, f"OTHER DEVICE OR VERSION one: .*{text}")
    assert {path: path.read_bytes() for path in before} == before
    assert len(baseline.records()) == 4
    assert baseline.run(COMPARE).ret == 0


@pytest.mark.long
def test_a_changed_tree_is_judged_and_not_kept_unless_asked(baseline: Suite) -> None:
    baseline.commit("b" * 40 + "+dirty")
    assert baseline.run(COMPARE).ret == 0
    assert len(baseline.records()) == 2
    baseline.measure(9.0)
    assert baseline.run("--record").ret == 0
    assert baseline.run(COMPARE).ret == 10


# -- options ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-n", "2"], "-n: timings are taken one after the other"),
        (["--results-dir", "expected.json"], "--results-dir expected.json: File exists; name a"),
        (["--groups", "one,three"], "--groups names 'three', .*: choose from one, two"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(
    baseline: Suite, args: list[str], message: str
) -> None:
    result = baseline.run(COMPARE, *args)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    lines(result, message)
    assert not re.search(r"\d passed", result.stdout.str())
    assert len(baseline.records()) == 2


def test_a_corrupt_record_is_named_before_anything_runs(baseline: Suite) -> None:
    path = baseline.paths()[0]
    path.write_text(path.read_text()[:40])
    result = baseline.run(COMPARE)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    lines(result, f"{path.name} is not a record of this version.*; repair or remove that file")
    assert "passed" not in result.stdout.str()


@pytest.mark.long
@pytest.mark.parametrize(
    "args",
    [
        ["--benchmark-save", "mine"],
        ["--benchmark-storage", "elsewhere", "--benchmark-autosave", "--benchmark-json", "x.json"],
    ],
    ids=" ".join,
)
def test_what_the_benchmark_plugin_saves_is_in_the_table_and_changes_no_verdict(
    baseline: Suite, args: list[str]
) -> None:
    baseline.measure(1.2)
    for saved in ("", "=0001"):
        result = baseline.run(COMPARE + saved, *args)
        assert result.ret == 10
        lines(result, "SLOWER one/a")
    lines(result, r"\(0001_")
    baseline.measure()
    assert baseline.run(COMPARE, *args).ret == 0
    del result  # a result holds its whole session
    gc.collect()  # a file that was left open is an error here, not in whatever test comes next


@pytest.mark.parametrize("plugin", ["tinyllama.harness.plugins.benchmarks", "benchmark"])
def test_without_the_plugins_nothing_is_green(baseline: Suite, plugin: str) -> None:
    assert baseline.run("-p", f"no:{plugin}", COMPARE).ret != 0


def test_without_options_nothing_is_written(suite: Suite) -> None:
    assert suite.run().ret == 0
    assert not list(suite.pytester.path.glob("results"))


@pytest.mark.long
def test_results_go_to_the_folder_named(suite: Suite) -> None:
    assert suite.run("--record", "--results-dir", "deep/mine").ret == 0
    assert len(list(Path("deep/mine").glob("*/*.json"))) == 2
    assert suite.run(COMPARE).ret == 12
    assert suite.run(COMPARE, "--results-dir=deep/mine").ret == 0


# -- groups ----------------------------------------------------------------------------------


def test_only_the_groups_named_are_measured_and_expected(baseline: Suite) -> None:
    result = baseline.run(COMPARE, "--groups", "two")
    assert result.ret == 0
    result.assert_outcomes(passed=2 + 2, deselected=2)
    lines(result, r"2  not in --groups")
    assert sum(record["group"] == "two" for record in baseline.records()) == 2


@pytest.mark.long
def test_a_group_is_measured_once(suite: Suite) -> None:
    text = Path("test_timed.py").read_text()
    Path("test_other.py").write_text(text)
    result = suite.pytester.runpytest_inprocess("--device", "cpu", "--record")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    lines(result, "group 'one' is measured twice")
    assert not any(record["complete"] for record in suite.records())


# -- readings of perf_tests -----------------------------------------------------------------------


@pytest.mark.long
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
