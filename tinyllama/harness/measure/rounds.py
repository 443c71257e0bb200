"""Interleaved rounds of the things compared, and the confidence interval of their ratio."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import scipy

from tinyllama.harness.records.entries import Quartiles, Ratio

FEWEST_ROUNDS = 8
T = TypeVar("T")


def interleaved(turns: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """What each turn returns in each round; the order is A B C, C B A, A B C, ...

    Clocks, temperature and other work on the machine drift: what is compared must be measured
    alternately, and each turn must come first as often as last.
    """
    results: dict[str, list[T]] = {name: [] for name in turns}
    for index in range(rounds):
        for name in list(turns)[:: 1 if index % 2 == 0 else -1]:
            results[name].append(turns[name]())
    return results


def ratio(slow: Sequence[float], fast: Sequence[float]) -> Ratio:
    """The ratio of two interleaved series, round by round.

    The interval is that of the median by order statistics, which assumes no distribution.
    Raises ValueError for fewer than 8 rounds, which give no interval of 99%.
    """
    ratios = [s / f for s, f in zip(slow, fast, strict=True)]
    if len(ratios) < FEWEST_ROUNDS:
        raise ValueError(f"{len(ratios)} rounds give no 99% interval: use {FEWEST_ROUNDS} or more")
    test = scipy.stats.quantile_test(ratios, q=statistics.median(ratios), p=0.5)
    interval = test.confidence_interval(confidence_level=0.99)
    return Ratio(statistics.median(ratios), float(interval.low), float(interval.high))


def summary(name: str, readings: Sequence[float]) -> dict[str, Any]:
    """A series of readings as fields of an entry: the median, and the readings at the quartiles."""
    quartiles = Quartiles(*np.quantile(readings, (0.25, 0.75), method="nearest").tolist())
    return {name: statistics.median(readings), f"{name}_quartiles": quartiles}
