"""The rule by which blocks of interleaved pairs decide whether a candidate is slower.

A *block* is one fresh launch of both sides; its statistic is the median, over its turns A B B A, of
the logarithm of candidate over base. Blocks, not turns, are independent: clocks, addresses and the
memory layout are drawn once for each launch. So the interval is over blocks.

There is a look after 4, 8, 12, 16 and 20 blocks. Two error rates hold over all looks together:

- ``alpha`` of a false SLOWER in all tests of a merge, spent over the looks as O'Brien and Fleming
  do (Lan and DeMets 1983, Biometrika 70:659, their first function), so that an early stop needs
  much evidence;
- ``miss`` of calling a slowdown of the tolerance SAME, for each test, spent evenly over the looks,
  so that equal sides are recognised early.

Each look spends its own share of either, which bounds the error for any dependence between looks,
on Student's t. The variance is pooled with that of the device's own A/A blocks, unless today's is
larger than those allow (F test at 0.001). Then today's is used alone.

A large effect ends at the first look, where each of its four blocks is beyond five tolerances.
Student's t with three degrees of freedom cannot tell it from noise; that no block is small can.
"""

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

LOOKS = (4, 8, 12, 16, 20)
LEAST_SPREAD = 2e-4  # of a block's statistic; more blocks do not average it away
UNLIKE_HISTORY = 1e-3  # p of the F test below which the history is not used
CONFIRM_BLOCKS = 8  # 4 would fail to confirm slowdowns that the looks find
FAR = 5  # tolerances; on a CPU without history a slowdown of 3 times took all 20 blocks
CONFIRM_ALPHA = 0.05  # one-sided: the confirmation's interval must lie above zero

Floats = NDArray[np.float64]


def of_block(logs: ArrayLike) -> Floats:
    """Statistics (...) of blocks from the logarithms (..., pairs) of candidate over base, in order;
    the number of pairs is even.

    A turn just after the other side's finds colder caches than one after its own. In A B that is
    the candidate's and in B A the base's, so single pairs form two clusters with the median between
    them: on a CPU its spread was 2 to 6 times that of the median over A B B A (docs/design.md).
    """
    pairs = np.asarray(logs, dtype=float)
    both_ways = pairs.reshape(*pairs.shape[:-1], -1, 2).mean(axis=-1)
    return np.asarray(np.median(both_ways, axis=-1))


class Call(Enum):
    """A decision by the blocks so far."""

    MORE = 0  # undecided: take more blocks; after the last look it is inconclusive
    SAME = 1
    FASTER = 2
    SLOWER = 3


@dataclass(frozen=True)
class Spread:
    """The standard deviation of a block's statistic between A/A blocks, with its degrees of
    freedom. 0 degrees: unknown."""

    deviation: float = 0.0
    freedom: int = 0

    @staticmethod
    def of(statistics: Any) -> "Spread":
        """The spread of A/A blocks, whose true mean is zero: both sides run the same code."""
        values = np.asarray(statistics, dtype=float)
        if values.size == 0:
            return Spread()
        return Spread(float(np.sqrt(np.mean(values**2))), int(values.size))


@dataclass(frozen=True)
class Rule:
    """How one figure of one benchmark is decided.

    tests: figures that a merge decides on; alpha is shared among them.
    margin: a ratio up to 1 + margin counts as no slowdown. tolerance: SAME means a slowdown below
    it. alpha: of a false SLOWER in a merge. miss: of calling a slowdown of the tolerance SAME.
    """

    tests: int
    margin: float = 0.005
    tolerance: float = 0.02
    alpha: float = 1e-3
    miss: float = 2.5e-3

    def __post_init__(self) -> None:
        if not 0 < self.margin < self.tolerance < math.inf:
            raise ValueError(
                f"margin {self.margin:g} and tolerance {self.tolerance:g}: the tolerance must be "
                "larger, and both above 0 and finite"
            )

    def slower_level(self, look: int) -> float:
        """The one-sided error of SLOWER that this look (from 0) may spend."""
        alpha = self.alpha / self.tests
        normal = scipy.stats.norm
        spent = [2 * normal.sf(normal.isf(alpha / 2) / np.sqrt(t)) for t in _TIMES]
        return float(spent[look] - (spent[look - 1] if look else 0.0))


_TIMES = [blocks / LOOKS[-1] for blocks in LOOKS]


@dataclass(frozen=True)
class Bounds:
    """Of log(candidate / base): the mean, the lower bound for SLOWER, and both bounds for SAME and
    FASTER."""

    mean: Floats
    slower_low: Floats
    green_low: Floats
    green_high: Floats


def bounds(statistics: Floats, look: int, rule: Rule, history: Spread) -> Bounds:
    """The intervals after a look. statistics: (..., blocks), the last axis of LOOKS[look]."""
    mean = statistics.mean(axis=-1)
    error, freedom = _standard_error(statistics, history)
    slower = scipy.stats.t.isf(rule.slower_level(look), freedom) * error
    green = scipy.stats.t.isf(rule.miss / len(LOOKS), freedom) * error
    return Bounds(mean, mean - slower, mean - green, mean + green)


def _standard_error(statistics: Floats, history: Spread) -> tuple[Floats, Floats]:
    """The standard error of the mean over blocks, with its degrees of freedom."""
    blocks = statistics.shape[-1]
    sampled, floor = statistics.var(axis=-1, ddof=1), LEAST_SPREAD**2
    freedom = np.full(sampled.shape, blocks - 1.0)
    variance = sampled
    if history.freedom:
        expected = max(history.deviation**2, floor)
        limit = expected * scipy.stats.f.isf(UNLIKE_HISTORY, blocks - 1, history.freedom)
        pooled = history.freedom * expected + (blocks - 1) * sampled
        alike = sampled <= limit
        variance = np.where(alike, pooled / (history.freedom + blocks - 1), sampled)
        freedom = np.where(alike, history.freedom + blocks - 1.0, blocks - 1.0)
    return np.sqrt(np.maximum(variance, floor) / blocks), freedom


def decide(statistics: Any, rule: Rule, history: Spread) -> Call:
    """The decision on one figure; the number of its blocks must be one of `LOOKS`."""
    values = np.asarray(statistics, dtype=float)
    look = LOOKS.index(len(values))
    interval = bounds(values, look, rule, history)
    margin = np.log1p(rule.margin)
    if interval.slower_low > margin or (look == 0 and far_above(values, rule) < 0):
        return Call.SLOWER
    if interval.green_high < -margin:
        return Call.FASTER
    return Call.SAME if interval.green_high < np.log1p(rule.tolerance) else Call.MORE


def far_above(statistics: Any, rule: Rule) -> Any:
    """How much slower (in logarithms) the first blocks would have to be for a large effect; below
    0: they are beyond it already. statistics: (..., blocks)."""
    values = np.asarray(statistics, dtype=float)
    above = np.log1p(FAR * rule.tolerance) - values.min(axis=-1)
    return np.where(np.isfinite(values).all(axis=-1), above, np.inf)


def confirmed(statistics: Any, rule: Rule, history: Spread) -> Any:
    """Whether fresh blocks confirm a SLOWER. statistics: (..., CONFIRM_BLOCKS); or as many as of
    the first look, all of which confirm a large effect."""
    if np.shape(statistics)[-1] == LOOKS[0]:
        return far_above(statistics, rule) < 0
    return confirmation_low(statistics, history) > 0


def confirmation_low(statistics: Any, history: Spread) -> Any:
    """The lower bound of log(candidate / base) over the blocks that confirm a SLOWER."""
    values = np.asarray(statistics, dtype=float)
    error, freedom = _standard_error(values, history)
    return values.mean(axis=-1) - scipy.stats.t.isf(CONFIRM_ALPHA, freedom) * error
