"""The plugins: what was left out is counted with its reason, and no comparison fails open."""

import json
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

PLUGINS = 'pytest_plugins = ["tinyllama.harness.plugin", "tinyllama.harness.benchmarks"]'

TIMED = """
import pytest

@pytest.mark.parametrize("name", {names})
def test_time(name, record):
    record(name, seconds={seconds}, seconds_quartiles=[{seconds}, {seconds}])
    assert {passes}
"""


ROOT = Path(__file__).parent.parent


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)
    pytester.makeconftest(PLUGINS)
    pytester.makeini(f"[pytest]\npythonpath = {ROOT}\nmarkers =\n    slow: left out\n")
    return pytester


def timed(
    suite: pytest.Pytester,
    *args: str,
    names: tuple[str, ...] = ("a", "b"),
    seconds: float = 1.0,
    passes: bool = True,
) -> pytest.RunResult:
    text = TIMED.format(names=list(names), seconds=seconds, passes=passes)
    suite.makepyfile(test_timed=text)
    return suite.runpytest_inprocess("test_timed.py", "--device", "cpu", *args)


def stored(suite: pytest.Pytester) -> list[dict]:
    return [json.loads(p.read_text()) for p in sorted(Path(suite.path).glob("results/*/*.json"))]


def test_left_out_cases_are_counted_by_reason(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        """
        import pytest
        @pytest.mark.slow("takes an hour")
        @pytest.mark.parametrize("i", range(3))
        def test_slow(i): pass
        @pytest.mark.skip(reason="no such device")
        def test_skipped(): pass
        def test_quick(): pass
        """
    )
    for args in ([], ["-n", "2"]):
        found = suite.runpytest_subprocess(*args)
        found.assert_outcomes(passed=1, skipped=1)
        found.stdout.fnmatch_lines(
            ["4 cases left out", "*3  slow, run with -m slow: takes an hour", "*1  no such device"]
        )
    suite.runpytest_subprocess("-m", "slow").assert_outcomes(passed=3)


def test_a_slow_case_without_a_reason_is_an_error(suite: pytest.Pytester) -> None:
    suite.makepyfile("import pytest\n@pytest.mark.slow\ndef test_slow(): pass")
    found = suite.runpytest_inprocess()
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    found.stderr.fnmatch_lines(["*test_slow: pytest.mark.slow needs a reason"])


def test_a_soak_repeats_random_cases_with_fresh_seeds(suite: pytest.Pytester) -> None:
    suite.makepyfile("def test_random(seed): print('seed', seed)\ndef test_fixed(): pass")
    found = suite.runpytest_inprocess("--soak-seeds", "3", "--soak-base", "40", "-v")
    found.assert_outcomes(passed=3, deselected=1)
    found.stdout.fnmatch_lines(["*test_random?seed42?*", "*1  not in a soak: takes no random*"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--device", "warp"], "--device warp:"),
        (["--ops", "nowhere.py"], "--ops nowhere.py: no such file"),
        (["--soak-seeds", "-1"], "--soak-seeds is -1"),
        (["--benchmark-compare", "-n", "2"], "with xdist times nothing"),
        (["--benchmark-compare", "--benchmark-disable"], "disabled times nothing"),
    ],
)
def test_bad_options_are_refused(suite: pytest.Pytester, args: list[str], message: str) -> None:
    suite.makepyfile("def test_nothing(device): pass")
    found = suite.runpytest_inprocess(*args)
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    assert message in found.stderr.str() + found.stdout.str()


def test_without_a_baseline_it_says_so_and_records_one(suite: pytest.Pytester) -> None:
    found = timed(suite, "--benchmark-compare")
    assert found.ret == 12
    found.stdout.fnmatch_lines(["NO BASELINE for *", "recorded *", "exit status 12: NO BASELINE"])
    (record,) = stored(suite)
    assert record["complete"]
    assert [entry["name"] for entry in record["entries"]] == ["a", "b"]
    assert set(record) >= {"device", "versions", "commit", "date", "command", "schema"}


def test_the_same_timings_pass_and_slower_ones_do_not(suite: pytest.Pytester) -> None:
    assert timed(suite, "--benchmark-compare").ret == 12
    assert timed(suite, "--benchmark-compare").ret == 0
    before = len(stored(suite))
    slower = timed(suite, "--benchmark-compare", seconds=1.2)
    assert slower.ret == 10
    slower.stdout.fnmatch_lines(["SLOWER a: 1.200 times as long", "exit status 10: SLOWER"])
    assert len(stored(suite)) == before, "a run that is slower became the baseline"
    assert timed(suite, "--benchmark-compare", seconds=1.2).ret == 10


def test_missing_and_new_timings_are_named(suite: pytest.Pytester) -> None:
    timed(suite, "--benchmark-compare")
    found = timed(suite, "--benchmark-compare", names=("a", "c"))
    assert found.ret == 15
    found.stdout.fnmatch_lines(["MISSING b: *", "SAME a: *", "NEW c: *"])


def test_a_run_with_a_failure_is_never_a_baseline(suite: pytest.Pytester) -> None:
    assert timed(suite, "--benchmark-compare", passes=False).ret == pytest.ExitCode.TESTS_FAILED
    assert not stored(suite)
    assert timed(suite, "--benchmark-compare").ret == 12


def test_a_comparison_that_measured_nothing_is_not_green(suite: pytest.Pytester) -> None:
    timed(suite, "--benchmark-compare")
    assert timed(suite, "--benchmark-compare", names=()).ret == 15


def test_other_versions_are_not_compared(suite: pytest.Pytester) -> None:
    timed(suite, "--benchmark-compare")
    (path,) = Path(suite.path).glob("results/*/*.json")
    record = json.loads(path.read_text())
    record["versions"]["torch"] = "1.0"
    path.write_text(json.dumps(record))
    found = timed(suite, "--benchmark-compare", seconds=9.0)
    assert found.ret == 13
    found.stdout.fnmatch_lines(["OTHER VERSIONS: the last record has *1.0*"])


def test_a_file_that_is_no_record_stops_the_comparison(suite: pytest.Pytester) -> None:
    timed(suite, "--benchmark-compare")
    (path,) = Path(suite.path).glob("results/*/*.json")
    path.write_text(path.read_text()[:40])
    found = timed(suite, "--benchmark-compare")
    assert found.ret not in (0, 12)
    assert "is not a record of this version" in found.stdout.str() + found.stderr.str()


def test_without_compare_nothing_is_written_unless_asked(suite: pytest.Pytester) -> None:
    assert timed(suite).ret == 0
    assert not stored(suite)
    assert timed(suite, "--record").ret == 0
    assert len(stored(suite)) == 1
