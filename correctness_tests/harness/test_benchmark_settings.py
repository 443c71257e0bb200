"""The plugin for timings under other settings: devices, versions, commits, options, resuming."""

import gc
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from correctness_tests.support.timed_suite import COMPARE, Suite, ends, lines, timing
from tinyllama.harness.plugins import benchmarks

pytest_plugins = ["pytester"]


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
    ends(baseline.run(COMPARE), 13, f"OTHER DEVICE OR VERSION one: .*{text}")
    assert {path: path.read_bytes() for path in before} == before
    assert len(baseline.records()) == 4
    assert baseline.run(COMPARE).ret == 0


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
        (["-n", "2"], "remove -n"),
        (["-d", "--tx", "2*popen"], "remove -n"),
        (["--benchmark-disable"], "--benchmark-disable measures nothing"),
        (["--benchmark-disable", "--benchmark-enable"], "--benchmark-disable measures nothing"),
        (["--benchmark-skip"], "--benchmark-skip measures nothing"),
        (["--collect-only"], "--collect-only measures nothing"),
        (["--setup-only"], "--setup-only measures nothing"),
        (["--setup-plan"], "--setup-only measures nothing"),
        (["--benchmark-histogram"], "--benchmark-histogram draws no records"),
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


def test_resuming_nothing_is_refused(suite: Suite) -> None:
    ends(
        suite.run("--resume"),
        pytest.ExitCode.USAGE_ERROR,
        "--resume goes with --record or --benchmark-compare",
    )


def test_a_corrupt_record_is_named_before_anything_runs(baseline: Suite) -> None:
    path = baseline.paths()[0]
    path.write_text(path.read_text()[:40])
    found = baseline.run(COMPARE)
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    lines(found, f"{path.name} is not a record of this version.*; repair or remove that file")
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
    del found  # a result holds its whole session
    gc.collect()  # a file that was left open is an error here, not in whatever test comes next


@pytest.mark.parametrize("plugin", ["tinyllama.harness.plugins.benchmarks", "benchmark"])
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
    ends(
        suite.run("--record"),
        pytest.ExitCode.TESTS_FAILED,
        "tolerance of 'second': known are seconds, ",
    )


@pytest.mark.parametrize("option", [COMPARE, "--record"])
def test_a_run_is_resumed_where_it_ended(suite: Suite, option: str) -> None:
    suite.right("assert group.record.group != 'two'")
    assert suite.run(option).ret == pytest.ExitCode.TESTS_FAILED
    suite.right()
    ends(
        suite.run(option, "--resume"),
        (12 if option == COMPARE else 0),
        r"2  --resume: one was recorded at 20",
    )
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


@pytest.mark.parametrize("fields", [{"versions": {"torch": "1.0"}}, {"device": "another card"}])
def test_what_another_setting_recorded_is_not_left_out(
    baseline: Suite, fields: dict[str, Any]
) -> None:
    stored_elsewhere(baseline, **fields)
    baseline.run("--record", "--resume").assert_outcomes(passed=4)
    assert len(baseline.records()) == 4
    baseline.run("--record", "--resume").assert_outcomes(deselected=4)


@pytest.mark.parametrize(
    ("tables", "kept", "saved", "compare", "told"),
    [
        ([], [], [], False, []),
        (["a row"], [], None, False, ["= ladder", "a row"]),
        ([], ["kept"], None, False, ["= records", "v is SLOWER", "kept"]),
        ([], ["kept"], ["faster"], True, ["= comparison", "v is SLOWER", "kept", "faster"]),
        (["a row"], [], ["same"], False, ["= ladder", "a row", "= records", "same"]),
    ],
)
def test_a_session_ends_with_its_tables_and_what_became_of_its_records(
    tables: list[str],
    kept: list[str],
    saved: list[str] | None,
    compare: bool,
    told: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verdicts = [("v", "v is SLOWER")] if kept else []
    recording = SimpleNamespace(
        finished=lambda: tables, verdicts=verdicts, lines=kept, compare=compare
    )
    beside = None if saved is None else SimpleNamespace(lines=lambda: saved)
    config: Any = SimpleNamespace(stash={benchmarks.RECORDING: recording, benchmarks.SAVED: beside})
    monkeypatch.setattr(benchmarks, "terminal", lambda records: records)
    found: list[str] = []
    reporter = SimpleNamespace(section=lambda one: found.append(f"= {one}"), line=found.append)
    benchmarks.pytest_terminal_summary(reporter, config)
    assert found == told
