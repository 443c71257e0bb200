"""Interleaved rounds: drift falls out of a ratio, and its interval covers the truth."""

import random
from collections.abc import Callable

import pytest

from tinyllama.harness.measure.rounds import FEWEST_ROUNDS, Ratio, interleaved, ratio


def test_turns_alternate_and_each_comes_first_as_often_as_last() -> None:
    order: list[str] = []

    def turn(name: str) -> Callable[[], float]:
        def call() -> float:
            order.append(name)
            return float(len(order))

        return call

    seconds = interleaved({name: turn(name) for name in "ABC"}, rounds=4)
    assert "".join(order) == "ABCCBAABCCBA"
    assert seconds == {"A": [1, 6, 7, 12], "B": [2, 5, 8, 11], "C": [3, 4, 9, 10]}


def drifting(rounds: int, growth: float) -> dict[str, list[float]]:
    """Two contenders, one twice as slow, on a machine that slows down with every turn."""
    turns = 0

    def turn(seconds: float) -> Callable[[], float]:
        def call() -> float:
            nonlocal turns
            turns += 1
            return seconds * growth**turns

        return call

    return interleaved({"slow": turn(2.0), "fast": turn(1.0)}, rounds)


def test_drift_falls_out_of_the_ratio() -> None:
    """The machine slows down by a factor of 7 meanwhile; the ratio moves by one turn's drift."""
    seconds = drifting(rounds=100, growth=1.01)
    assert max(seconds["fast"]) > 7 * min(seconds["fast"])
    result = ratio(seconds["slow"], seconds["fast"])
    assert result.median == pytest.approx(2.0, rel=1e-3)
    assert 2.0 / 1.011 < result.low < 2.0 < result.high < 2.0 * 1.011


def test_a_ratio_is_the_median_of_the_rounds_with_its_interval() -> None:
    fast = [1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0, 3.0]
    result = ratio([2.0, 4.0, 6.0, 2.0, 2.0, 2.0, 2.0, 9.0], fast)
    assert result == Ratio(2.0, 2.0, 4.0)
    assert result == (2.0, 2.0, 4.0)
    assert str(Ratio(1.234, 1.0, 1.5)) == "1.23 [1.00, 1.50]"


@pytest.mark.long
@pytest.mark.parametrize("rounds", [8, 15, 40])
def test_the_interval_covers_the_true_median_in_99_of_100_runs(rounds: int) -> None:
    """Of skewed times (log-normal, some of them disturbed), whatever their distribution."""
    draw, runs = random.Random(rounds), 600

    def seconds() -> float:
        return draw.lognormvariate(0.0, 0.5) * (5.0 if draw.random() < 0.05 else 1.0)

    truth = 1.0  # both series have the same distribution
    missed = 0
    for _ in range(runs):
        result = ratio([seconds() for _ in range(rounds)], [seconds() for _ in range(rounds)])
        assert result.low <= result.median <= result.high
        missed += not result.low <= truth <= result.high
    # Binomial with p = 0.01: a correct interval misses more than 14 with a chance below 0.001.
    assert missed <= 14


@pytest.mark.parametrize("rounds", [0, 1, FEWEST_ROUNDS - 1])
def test_too_few_rounds_for_an_interval_are_an_error(rounds: int) -> None:
    with pytest.raises(ValueError, match=f"{rounds} rounds give no 99% interval: use 8"):
        ratio([1.0] * rounds, [1.0] * rounds)
