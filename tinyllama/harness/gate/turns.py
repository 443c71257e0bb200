"""Two questions beside the median of a block: is a share of the turns slower, and are calls on new
values?

Slow turns. The median of a block, and the fastest of some calls, do not show a slowdown of every
fifth call. So each turn also gives the mean of its calls. A side's excess is log(mean / median)
over the turns of a block, each at most `MOST` times the median. The candidate's excess over the
base's is near zero for equal code. Its mean over blocks is tested on Student's t, with an error
rate of its own, `ALPHA` for all figures and looks of a merge.

New values. The turns of a block repeat two sets of inputs. A call that keeps results by a few
values of its inputs is quick on those. So one turn has inputs from a seed that no process has seen:
its results are held to eager's, and it may not take longer than a turn on repeated inputs.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from statistics import mean, median, stdev

from scipy import stats

from tinyllama.harness.gate.decision import LOOKS

MOST = 2.0  # times the median, or a turn's fastest call: one that was interrupted decides nothing
ALPHA = 5e-4  # of a false SLOWER in a merge, beside that of the medians
MARGIN = 0.01  # of the mean call; 20% of calls that are 50% slower make it 10% slower
LEAST_SPREAD = 0.005  # of an excess between blocks
SUSPECT, ERRORS = 0.04, 2.0  # an excess, and how many standard errors: more blocks are taken
FRESH_RATIO, TRIES = 1.5, 5  # of turns on new and on repeated values; how often that is tried
MEAN = "mean "  # before a metric: the mean of a turn's calls
CALL = "a call"  # the longer of its times on both clocks, to which the judge's clock is held

Turn = Mapping[str, float]


def times(turn: Turn) -> set[str]:
    """The metrics of which a turn gives a time."""
    return {metric for metric in turn if metric != CALL and not metric.startswith(MEAN)}


def mean_call(seconds: Sequence[float]) -> float:
    """Of a turn's calls, each at most `MOST` times the fastest."""
    return mean(min(one, MOST * min(seconds)) for one in seconds)


def excess(turns: Sequence[Turn], metric: str) -> float:
    """Of a side's turns in a block."""
    middle = median(one[metric] for one in turns)
    means = [one.get(MEAN + metric, one[metric]) for one in turns]
    return math.log(mean(min(value, MOST * middle) for value in means) / middle)


def lowest(excesses: Sequence[float], tests: int) -> float:
    """The lower bound of the mean excess over blocks. tests: figures of a merge."""
    level = ALPHA / tests / len(LOOKS)
    return mean(excesses) - float(stats.t.isf(level, len(excesses) - 1)) * _error(excesses)


def slower(excesses: Sequence[float], tests: int, accepted: float = 0.0) -> bool:
    """Whether a share of the turns is certainly slower."""
    return lowest(excesses, tests) > math.log1p(MARGIN + accepted)


def suspect(excesses: Sequence[float]) -> bool:
    """Whether more blocks are needed to tell."""
    found = mean(excesses)
    return found > SUSPECT and found > ERRORS * _error(excesses)


def _error(excesses: Sequence[float]) -> float:
    return max(stdev(excesses), LEAST_SPREAD) / math.sqrt(len(excesses))


def check_new_values(name: str, turn: Callable[..., Turn]) -> None:
    """Compare turns of a side on new and on repeated values. turn: takes a turn; a seed is that of
    new values.

    Raises ValueError for a side that is slower on new values, each time it is tried.
    """
    ratios = []
    for _ in range(TRIES):
        known, new = turn(), turn(1 + secrets.randbelow(2**40))
        ratios.append(max(new[metric] / known[metric] for metric in known if metric != CALL))
        if ratios[-1] <= FRESH_RATIO:
            return
    raise ValueError(
        f"the {name} takes at least {min(ratios):.3g} times as long on new values as on repeated "
        "ones: it keeps results by the values of its inputs"
    )
