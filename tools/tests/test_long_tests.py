"""Tests that take long are found by the mean of their parameters."""

from types import SimpleNamespace
from typing import Any

import pytest

from tools.long_tests import ALWAYS, LONGEST, TAKEN, Seconds


def found(taken: dict[str, tuple[float, dict[str, float]]]) -> list[str]:
    """The long functions of reports: own seconds and those of shared fixtures, by test."""
    seconds = Seconds()
    for name, value in taken.items():
        for when in ("setup", *(["call"] if "skipped" not in name else []), "teardown"):
            values = [(TAKEN, value)] if when == "teardown" else []
            report: Any = SimpleNamespace(nodeid=name, when=when, user_properties=values)
            seconds.pytest_runtest_logreport(report)
    return seconds.long()


def test_long_functions_are_those_above_the_limit_on_average() -> None:
    taken = {
        "a.py::test_long[0]": 0.1,
        "a.py::test_long[1]": 2 * LONGEST,
        "a.py::test_long[skipped]": 0.0,
        "a.py::test_short[x[y]]": 0.9 * LONGEST,
        f"{ALWAYS[0]}::test_it": 9.0,
    }
    assert found({name: (own, {}) for name, own in taken.items()}) == ["a.py::test_long"]


@pytest.mark.parametrize(("seconds", "long"), [(2.1 * LONGEST, True), (1.9 * LONGEST, False)])
def test_a_shared_fixture_is_paid_by_all_that_use_it(seconds: float, long: bool) -> None:
    """Whichever test of its file is the first."""
    made = "a.py::made"
    users = {"a.py::test_a": (0.0, {made: seconds}), "a.py::test_b": (0.0, {made: 0.0})}
    assert found({**users, "a.py::test_c": (0.0, {})}) == (list(users) if long else [])
