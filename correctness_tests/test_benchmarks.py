"""The plugin for timings: what is compared is what is expected, and no way around it is green.

Each test runs a suite of two groups whose timings come from a file.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from correctness_tests.commands import ENVIRONMENT
from tinyllama.harness import machine, results

pytest_plugins = ["pytester"]

# Triton aborts when one process imports it twice, and pytester forgets what a test imported.
results.versions()
ROOT = Path(results.__file__).parents[2]
COMPARE = "--benchmark-compare"

CONFTEST = """
import json
from pathlib import Path

pytest_plugins = ["tinyllama.harness.plugin", "tinyllama.harness.benchmarks"]


def pytest_tinyllama_groups(config):
    return json.loads(Path("expected.json").read_text())


def pytest_benchmark_generate_machine_info(config):
    return {}  # asking the processor takes a second
"""

SUITE = """
import json, os
from pathlib import Path
import pytest

FIGURES = json.loads(Path("figures.json").read_text())


@pytest.fixture(scope="module", params=list(FIGURES), ids=str)
def group(request, recording):
    with recording.group(request.param) as measured:
        for name, values in FIGURES[request.param].items():
            measured.add(name, "op", **values)
        yield measured


def test_it_is_right(group):
    {right}


def test_it_is_fast(group, benchmark):
    benchmark.pedantic(lambda: None, rounds=2)
"""


class Suite:
    """A suite in a folder of its own, run in this process."""

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pytester, self.monkeypatch = pytester, monkeypatch
        pytester.makeconftest(CONFTEST)
        pytester.makeini(
            f"[pytest]\npythonpath = {ROOT}\n"
            "addopts = -p no:cacheprovider -p no:hypothesispytest -p no:anyio\n"
            "markers =\n    slow: left out\n"
        )
        self.expect("one", "two")
        self.right()
        self.measure()
        self.commit("a" * 40)

    def expect(self, *groups: str) -> None:
        Path("expected.json").write_text(json.dumps(groups))

    def right(self, statement: str = "assert True") -> None:
        self.pytester.makepyfile(test_timed=SUITE.replace("{right}", statement))

    def measure(self, seconds: Any = 1.0, names: str = "ab", groups: str = "one two") -> None:
        """What the suite will find: ``seconds`` of the first name of each group, 1 of others."""
        figures = {
            group: {
                f"{group}/{name}": timing(seconds if name == names[0] else 1.0) for name in names
            }
            for group in groups.split()
        }
        Path("figures.json").write_text(json.dumps(figures))

    def commit(self, commit: str) -> None:
        self.monkeypatch.setattr(results, "_commit", lambda: commit)

    def disturb(self, reasons: list[str | None]) -> None:
        """The reasons that the plugin is told, one after the other."""
        found = iter(reasons)
        self.monkeypatch.setattr(machine, "disturbance", lambda device: next(found, None))

    def run(self, *args: str) -> pytest.RunResult:
        argv = ("test_timed.py", "--device", "cpu", *args)
        return self.pytester.runpytest_inprocess(*argv, no_reraise_ctrlc=True)

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in self.paths()]

    def paths(self) -> list[Path]:
        return sorted(self.pytester.path.glob("results/*/*.json"))


def timing(seconds: Any) -> dict[str, Any]:
    return {"seconds": seconds, "seconds_quartiles": [seconds, seconds]}


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Suite:
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine, "disturbance", lambda device: None)
    return Suite(pytester, monkeypatch)


@pytest.fixture
def baseline(suite: Suite) -> Suite:
    """A suite that has a baseline of both groups."""
    assert suite.run("--record").ret == 0
    assert [record["complete"] for record in suite.records()] == [True, True]
    return suite


def lines(found: pytest.RunResult, *patterns: str) -> None:
    text = found.stdout.str() + found.stderr.str()
    for pattern in patterns:
        assert re.search(pattern, text, re.MULTILINE), f"{pattern}\n{text}"


# -- the verdict ------------------------------------------------------------------------------


def test_without_a_baseline_it_is_12_and_recorded_and_then_0(suite: Suite) -> None:
    found = suite.run(COMPARE)
    assert found.ret == 12
    lines(found, "NO BASELINE one: ", "recorded .*one.json$", r"exit status 12; .*NO BASELINE")
    assert [(r["group"], r["complete"]) for r in suite.records()] == [("one", True), ("two", True)]
    found = suite.run(COMPARE)
    assert found.ret == 0
    lines(found, r"SAME one/a: seconds 1\.000 times")
    assert len(suite.records()) == 4


def test_a_slowdown_is_10_and_never_becomes_the_baseline(baseline: Suite) -> None:
    baseline.measure(1.2)
    for _ in range(2):
        found = baseline.run(COMPARE)
        assert found.ret == 10
        lines(found, r"SLOWER one/a: seconds 1\.200 times", "not recorded one: no baseline")
        assert len(baseline.records()) == 2
    found = baseline.run(COMPARE, "--record")
    assert found.ret == 10
    assert sorted(r["complete"] for r in baseline.records()) == [False, False, True, True]
    assert baseline.run(COMPARE).ret == 10
    assert baseline.run("--record").ret == 0, "--record alone accepts a slowdown"
    assert baseline.run(COMPARE).ret == 0


def test_a_speed_up_is_0_and_the_next_baseline(baseline: Suite) -> None:
    baseline.measure(0.5)
    found = baseline.run(COMPARE)
    assert found.ret == 0
    lines(found, "FASTER one/a")
    baseline.measure(1.0)
    assert baseline.run(COMPARE).ret == 10


def test_quartiles_that_overlap_are_11(baseline: Suite) -> None:
    figures = json.loads(Path("figures.json").read_text())
    figures["one"]["one/a"] = {"seconds": 1.2, "seconds_quartiles": [0.9, 1.5]}
    Path("figures.json").write_text(json.dumps(figures))
    assert baseline.run(COMPARE).ret == 11
    assert sum(record["group"] == "one" for record in baseline.records()) == 1


@pytest.mark.parametrize("seconds", [float("nan"), 0, -1.0, "fast", None])
def test_what_is_no_measurement_is_never_green(baseline: Suite, seconds: Any) -> None:
    baseline.measure(seconds)
    assert baseline.run(COMPARE).ret == 15
    found = baseline.run("--record")
    assert found.ret == 15
    assert sum(record["complete"] for record in baseline.records()) == 2


def test_every_comparison_is_a_test_case_of_junit(baseline: Suite) -> None:
    baseline.measure(1.2)
    found = baseline.run(COMPARE, "--junitxml", "out.xml")
    found.assert_outcomes(passed=4 + 2, failed=2)
    suite = ElementTree.parse("out.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures")) == ("8", "2")
    cases = {f"{case.get('classname')} {case.get('name')}": case for case in suite}
    failure = cases["compare.one one/a"].find("failure")
    assert failure is not None
    assert "SLOWER one/a: seconds 1.200 times" in failure.get("message", "")
    assert cases["compare.one one/b"].find("failure") is None


# -- missing and new --------------------------------------------------------------------------


def test_a_new_benchmark_is_12_and_recorded(baseline: Suite) -> None:
    baseline.measure(names="abc")
    found = baseline.run(COMPARE)
    assert found.ret == 12
    lines(found, "NO BASELINE one/c: seconds is new")
    assert baseline.run(COMPARE).ret == 0


def test_a_missing_benchmark_is_15_until_it_is_recorded_without(baseline: Suite) -> None:
    baseline.measure(names="a")
    for _ in range(2):
        found = baseline.run(COMPARE)
        assert found.ret == 15
        lines(found, "MISSING one/b: in the baseline, not in this run")
    assert baseline.run("--record").ret == 0
    assert baseline.run(COMPARE).ret == 0


@pytest.mark.parametrize("option", [COMPARE, "--record"])
def test_a_missing_group_is_15(suite: Suite, option: str) -> None:
    suite.measure(groups="one")
    for _ in range(2):
        found = suite.run(option)
        assert found.ret == 15
        lines(found, "MISSING two: expected, and not measured to its end")


@pytest.mark.parametrize("option", [COMPARE, "--record"])
def test_a_run_that_expects_or_collects_nothing_is_15(suite: Suite, option: str) -> None:
    suite.measure(groups="")
    assert suite.run(option, "-k", "nothing").ret == 15
    suite.expect()
    found = suite.run(option)
    assert found.ret == 15
    lines(found, "MISSING groups: no groups are declared")


def test_a_group_nobody_expects_is_an_error(suite: Suite) -> None:
    suite.expect("one")
    assert suite.run(COMPARE).ret == 1
    assert suite.run().ret == 0


@pytest.mark.parametrize(
    ("statement", "text"),
    [
        ("pytest.skip('no such card')", "SKIPPED: no such card"),
        ("pytest.xfail('known')", "SKIPPED: xfail"),
    ],
)
def test_a_skipped_benchmark_is_15(baseline: Suite, statement: str, text: str) -> None:
    baseline.right(statement)
    found = baseline.run(COMPARE)
    assert found.ret == 15
    lines(found, rf"MISSING test_timed.py::test_it_is_right\[one\]: {text}")
    assert len(baseline.records()) == 2


@pytest.mark.parametrize(
    "args",
    [
        ["-k", "fast"],
        ["-k", "one"],
        ["-k", "nothing"],
        ["--deselect", "test_timed.py::test_it_is_right"],
        ["--benchmark-only"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("option", [COMPARE, "--record"])
def test_what_was_not_run_is_15_and_no_baseline(
    baseline: Suite, args: list[str], option: str
) -> None:
    found = baseline.run(option, *args)
    assert found.ret == 15
    complete = sorted(record["group"] for record in baseline.records() if record["complete"])
    assert complete == sorted(["one", "two", *(["one"] if args == ["-k", "one"] else [])])


def test_tests_chosen_by_name_may_not_be_all(baseline: Suite) -> None:
    args = ["test_timed.py::test_it_is_right", "test_timed.py::test_it_is_fast", "--device", "cpu"]
    found = baseline.pytester.runpytest_inprocess(*args, COMPARE)
    assert found.ret == 15
    lines(found, "chosen one by one, perhaps not all: choose with --groups")


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


@pytest.mark.parametrize("option", [COMPARE, "--record"])
@pytest.mark.parametrize("args", [[], ["-x"], ["--maxfail", "1"]], ids=["", "x", "maxfail"])
def test_timings_of_a_failed_test_are_no_baseline(
    suite: Suite, option: str, args: list[str]
) -> None:
    suite.right("assert group.record.group != 'two'")
    assert suite.run(option, *args).ret == pytest.ExitCode.TESTS_FAILED
    assert [r["group"] for r in suite.records() if r["complete"]] == ["one"]
    suite.right()
    found = suite.run(COMPARE)
    assert found.ret == 12
    lines(found, "NO BASELINE two")


def test_a_failure_keeps_its_status_and_the_verdict_is_said(baseline: Suite) -> None:
    baseline.measure(1.2)
    baseline.right("assert group.record.group != 'two'")
    found = baseline.run(COMPARE)
    assert found.ret == pytest.ExitCode.TESTS_FAILED
    lines(found, "SLOWER one/a", r"exit status 1; the worst verdict is SLOWER \(10\)")


@pytest.mark.parametrize("scope", ["function", "module"])
def test_an_error_while_tearing_down_the_last_test_counts(suite: Suite, scope: str) -> None:
    text = Path("test_timed.py").read_text() + (
        f"\n@pytest.fixture(scope='{scope}')\ndef broken(group):\n    yield\n"
        "    assert group.record.group != 'two'\n"
        "\ndef test_last(group, broken): pass\n"
    )
    Path("test_timed.py").write_text(text)
    assert suite.run(COMPARE).ret == pytest.ExitCode.TESTS_FAILED
    assert [r["group"] for r in suite.records() if r["complete"]] == ["one"]


@pytest.mark.parametrize(
    ("statement", "status"),
    [("raise KeyboardInterrupt", 2), ("pytest.exit('now', returncode=0)", 15)],
)
def test_an_interrupted_run_keeps_what_was_finished_only(
    suite: Suite, statement: str, status: int
) -> None:
    suite.right(f"\n    if group.record.group == 'two': {statement}")
    found = suite.run(COMPARE)
    assert found.ret == status
    assert [(r["group"], r["complete"]) for r in suite.records()] == [("one", True)]
    lines(found, "MISSING two: expected, and not measured to its end")


def test_a_crash_loses_only_the_group_that_was_measured(suite: Suite) -> None:
    suite.right("\n    if group.record.group == 'two': os._exit(9)")
    argv = ["-m", "pytest", "test_timed.py", "--device", "cpu", "--record"]
    done = subprocess.run([sys.executable, *argv], env=ENVIRONMENT, check=False)
    assert done.returncode == 9
    assert [(r["group"], r["complete"]) for r in suite.records()] == [("one", True)]


def test_a_record_that_cannot_be_saved_is_15(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(results, "save", full)
    for option in (COMPARE, "--record"):
        found = suite.run(option)
        assert found.ret == 15
        lines(found, "MISSING one: it could not be recorded: no space left")


@pytest.mark.parametrize("reasons", [["another process"], [None, "throttled"]])
def test_a_disturbed_group_is_14_and_no_baseline(suite: Suite, reasons: list[str | None]) -> None:
    for option in (COMPARE, "--record"):
        suite.disturb(list(reasons))
        found = suite.run(option, "--groups", "one")
        assert found.ret == 14
        lines(found, f"BUSY one: {reasons[-1]}")
    assert not any(record["complete"] for record in suite.records())
    suite.disturb(list(reasons))
    found = suite.run()
    assert found.ret == 0
    lines(found, f"BUSY one: {reasons[-1]}")


# -- other settings ---------------------------------------------------------------------------


def stored_elsewhere(suite: Suite, **fields: Any) -> None:
    for path in suite.paths():
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


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
    found = baseline.run(COMPARE)
    assert found.ret == 13
    lines(found, f"OTHER DEVICE OR VERSION one: .*{text}")
    assert {path: path.read_bytes() for path in before} == before
    assert len(baseline.records()) == 4
    assert baseline.run(COMPARE).ret == 0


@pytest.mark.parametrize("fields", [{"complete": False}, {"commit": "a" * 40 + "+dirty"}])
def test_records_that_are_incomplete_or_of_a_changed_tree_are_no_baselines(
    baseline: Suite, fields: dict[str, Any]
) -> None:
    stored_elsewhere(baseline, **fields)
    baseline.measure(9.0)
    assert baseline.run(COMPARE).ret == 12


def test_a_changed_tree_is_judged_and_not_kept_unless_asked(baseline: Suite) -> None:
    baseline.commit("b" * 40 + "+dirty")
    assert baseline.run(COMPARE).ret == 0
    assert len(baseline.records()) == 2
    baseline.measure(9.0)
    assert baseline.run("--record").ret == 0
    assert baseline.run(COMPARE).ret == 10


def test_without_git_a_second_run_compares_with_the_first(suite: Suite) -> None:
    suite.commit("unknown")
    assert suite.run(COMPARE).ret == 12
    assert suite.run(COMPARE).ret == 0


# -- options ----------------------------------------------------------------------------------


@pytest.mark.parametrize("option", [COMPARE, "--record"])
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-n", "2"], "leave -n away"),
        (["-d", "--tx", "2*popen"], "leave -n away"),
        (["--benchmark-disable"], "--benchmark-disable measures nothing"),
        (["--benchmark-disable", "--benchmark-enable"], "--benchmark-disable measures nothing"),
        (["--benchmark-skip"], "--benchmark-skip measures nothing"),
        (["--collect-only"], "--collect-only measures nothing"),
        (["--setup-only"], "--setup-only measures nothing"),
        (["--setup-plan"], "--setup-only measures nothing"),
        (["--benchmark-histogram"], "--benchmark-histogram draws no records"),
        (["--benchmark-compare-fail=min:5%"], "thresholds are declared"),
        (["--benchmark-compare-fail=min:5%", "--benchmark-compare-fail=mean:9%"], "declared"),
        (["--results-dir", "expected.json"], "--results-dir expected.json: File exists; name a"),
        (["--results-dir", "conftest.py/under"], "--results-dir conftest.py/under: Not a dir"),
        (["--results-dir", "/proc/none"], "--results-dir /proc/none: "),
        (["--groups", "one,three"], "--groups names 'three', .*: choose from one, two"),
        (["--groups", ""], "--groups names ''"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(
    baseline: Suite, option: str, args: list[str], message: str
) -> None:
    found = baseline.run(option, *args)
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    lines(found, message)
    assert not re.search(r"\d passed", found.stdout.str())
    assert len(baseline.records()) == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([COMPARE + "=0001"], "--benchmark-compare '0001': the baseline is the newest"),
        ([COMPARE + "="], "--benchmark-compare '': "),
        ([COMPARE, "test_timed.py"], "give the option no value, after the paths"),
        (["--resume"], "--resume goes with --record or --benchmark-compare"),
    ],
)
def test_options_with_a_wrong_value_are_refused(
    suite: Suite, args: list[str], message: str
) -> None:
    found = suite.run(*args)
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    lines(found, re.escape(message))


def test_a_corrupt_record_is_named_before_anything_runs(baseline: Suite) -> None:
    path = baseline.paths()[0]
    path.write_text(path.read_text()[:40])
    found = baseline.run(COMPARE)
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    lines(found, f"{path.name} is not a record of this version.*; repair that file or take it away")
    assert "passed" not in found.stdout.str()


@pytest.mark.parametrize(
    "args",
    [
        ["--benchmark-autosave"],
        ["--benchmark-save", "mine"],
        ["--benchmark-storage", "elsewhere", "--benchmark-autosave", "--benchmark-json", "x.json"],
    ],
    ids=" ".join,
)
def test_what_the_benchmark_plugin_saves_changes_no_verdict(
    baseline: Suite, args: list[str]
) -> None:
    baseline.measure(1.2)
    for _ in range(2):
        found = baseline.run(COMPARE, *args)
        assert found.ret == 10
        lines(found, "SLOWER one/a")
    baseline.measure()
    assert baseline.run(COMPARE, *args).ret == 0


@pytest.mark.parametrize("plugin", ["tinyllama.harness.benchmarks", "benchmark"])
def test_without_the_plugins_nothing_is_green(baseline: Suite, plugin: str) -> None:
    assert baseline.run("-p", f"no:{plugin}", COMPARE).ret != 0


def test_without_options_nothing_is_written(suite: Suite) -> None:
    assert suite.run().ret == 0
    assert not list(suite.pytester.path.glob("results"))


def test_results_go_to_the_folder_named(suite: Suite) -> None:
    assert suite.run("--record", "--results-dir", "deep/mine").ret == 0
    assert len(list(Path("deep/mine").glob("*/*.json"))) == 2
    assert suite.run(COMPARE).ret == 12
    assert suite.run(COMPARE, "--results-dir=deep/mine").ret == 0


# -- groups and resume ------------------------------------------------------------------------


def test_only_the_groups_named_are_measured_and_expected(baseline: Suite) -> None:
    found = baseline.run(COMPARE, "--groups", "two")
    assert found.ret == 0
    found.assert_outcomes(passed=2 + 2, deselected=2)
    lines(found, r"2  not in --groups")
    assert sum(record["group"] == "two" for record in baseline.records()) == 2


def test_a_group_is_measured_once(suite: Suite) -> None:
    text = Path("test_timed.py").read_text()
    Path("test_other.py").write_text(text)
    found = suite.pytester.runpytest_inprocess("--device", "cpu", "--record")
    assert found.ret == pytest.ExitCode.TESTS_FAILED
    lines(found, "group 'one' is measured twice")
    assert not any(record["complete"] for record in suite.records())


def test_entries_are_checked_when_added(suite: Suite) -> None:
    figures = {"one": {"one/a": {**timing(1.0), "tolerances": {"second": 2}}}}
    Path("figures.json").write_text(json.dumps(figures))
    found = suite.run("--record")
    assert found.ret == pytest.ExitCode.TESTS_FAILED
    lines(found, "tolerance of 'second': known are seconds, ")


@pytest.mark.parametrize("option", [COMPARE, "--record"])
def test_a_run_is_resumed_where_it_ended(suite: Suite, option: str) -> None:
    suite.right("assert group.record.group != 'two'")
    assert suite.run(option).ret == pytest.ExitCode.TESTS_FAILED
    suite.right()
    found = suite.run(option, "--resume")
    assert found.ret == (12 if option == COMPARE else 0), "the verdict is that of one run"
    lines(found, r"2  --resume: one was recorded at 20")
    complete = [record["group"] for record in suite.records() if record["complete"]]
    assert complete == ["one", "two"]


def test_a_resumed_group_is_judged_by_what_was_before_it(baseline: Suite) -> None:
    baseline.commit("b" * 40)
    stored_elsewhere(baseline, date="2020-01-01T00:00:00Z")
    baseline.measure(1.2)
    assert baseline.run("--record").ret == 0
    found = baseline.run(COMPARE, "--resume")
    found.assert_outcomes(deselected=4, failed=2, passed=2)
    assert found.ret == 10


@pytest.mark.parametrize("commit", ["b" * 40, "b" * 40 + "+dirty", "unknown"])
def test_other_code_is_not_left_out(suite: Suite, commit: str) -> None:
    suite.commit("a" * 40 if commit == "b" * 40 else commit)
    assert suite.run("--record").ret == 0
    suite.commit(commit)
    suite.run("--record", "--resume").assert_outcomes(passed=4)
