"""The plugin: devices, seeds, and what was left out is counted with its reason."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

PLUGINS = 'pytest_plugins = ["tinyllama.suites.entry", "tinyllama.harness.plugins.suite"]'

ROOT = Path(__file__).parents[2]


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)
    pytester.makeconftest(PLUGINS)
    pytester.makeini(f"[pytest]\npythonpath = {ROOT}\nmarkers =\n    slow: left out\n")
    return pytester


CASES = """
import pytest
@pytest.mark.slow("takes an hour")
@pytest.mark.parametrize("i", range(3))
def test_slow(i): pass
@pytest.mark.skip(reason="no such device")
def test_skipped(seed): pass
def test_quick(seed): pass
"""


@pytest.mark.long
def test_left_out_cases_are_counted_by_reason(suite: pytest.Pytester) -> None:
    suite.makepyfile(CASES)
    result = suite.runpytest_inprocess()
    result.assert_outcomes(passed=1, skipped=1, deselected=3)
    result.stdout.fnmatch_lines(
        ["4 cases left out", "*3  slow, run with -m slow: takes an hour", "*1  no such device"]
    )
    suite.runpytest_inprocess("-m", "slow").assert_outcomes(passed=3, deselected=2)


@pytest.mark.slow("workers of its own, which import torch")
def test_workers_leave_out_the_same(suite: pytest.Pytester) -> None:
    suite.makepyfile(CASES)
    result = suite.runpytest_subprocess("-q", "--device", "cpu", "-n", "2")
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(
        ["4 cases left out", "*3  slow, run with -m slow: takes an hour", "*1  no such device"]
    )


def test_a_slow_case_without_a_reason_is_an_error(suite: pytest.Pytester) -> None:
    suite.makepyfile("import pytest\n@pytest.mark.slow\ndef test_slow(): pass")
    result = suite.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*test_slow: pytest.mark.slow needs a reason"])


def test_the_seed_of_random_cases_is_an_option(suite: pytest.Pytester) -> None:
    suite.makepyfile("def test_random(seed): assert seed == 42")
    suite.runpytest_inprocess("--case-seed", "42").assert_outcomes(passed=1)


@pytest.mark.parametrize("quiet", [[], ["-q"], ["-q", "-n", "2"]], ids=str)
def test_a_device_that_is_not_there_is_refused_where_nothing_uses_it(
    suite: pytest.Pytester, quiet: list[str]
) -> None:
    """Quiet runs have no header, which asks for the device too."""
    suite.makepyfile("def test_nothing(): pass")
    result = suite.runpytest_inprocess("--device", "warp", *quiet)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "--device warp: " in result.stderr.str()
