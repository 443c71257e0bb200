"""What is checked in a block beside its median: whether a share of the turns is slower, and whether
the results of turns are right.

Slow turns. The median of a block, and the fastest of some calls, do not show a slowdown of every
fifth call. So each turn also gives the mean of its calls. A side's excess is log(mean / median)
over the turns of a block, each at most `MOST` times the median. The candidate's excess over the
base's is near zero for equal code. Its mean over blocks is tested on Student's t, with an error
rate of its own, `ALPHA` for all figures and looks of a merge.

Results. Each turn has values from a seed that no process has seen, the same for both sides. When
all turns of a block are over, some calls are chosen, and their results are compared with eager's
and float64's. If both sides gave the same bits before, calls in which they differ are chosen too.
"""

import math
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import mean, median, stdev
from typing import NamedTuple

import scipy

from tinyllama.harness.gate.decision import LOOKS, of_block
from tinyllama.harness.records.results import is_number

MOST = 2.0  # times the median, or a turn's fastest call: one that was interrupted decides nothing
ALPHA = 5e-4  # of a false SLOWER in a merge, beside that of the medians
MARGIN = 0.01  # of the mean call; 20% of calls that are 50% slower make it 10% slower
LEAST_SPREAD = 0.005  # of an excess between blocks
SUSPECT, ERRORS = 0.04, 2.0  # an excess, and how many standard errors: more blocks are taken
MOST_HELD = 2  # of calls in which the sides differ
TURN_RATIO = 4.0  # the fastest call of a turn, and the mean of calls in a row
IDLE_SHARE, IDLE_SECONDS = 0.02, 0.01  # that a side may work in the turns of the other
MEAN = "mean "  # before a metric: the mean of a turn's calls
CALL = "a call"  # the longer of its times on both clocks, to which the judge's clock is held

Turn = Mapping[str, float]


class Block(NamedTuple):
    """What the turns of a benchmark give, by metric: the statistic of `decision.of_block`, and the
    candidate's `excess` over the base's."""

    statistics: dict[str, float]
    excesses: dict[str, float]


def block(base: Sequence[Turn], candidate: Sequence[Turn], metrics: Iterable[str]) -> Block:
    """The block of these turns of both sides, in order."""
    found = Block({}, {})
    for metric in metrics:
        logs = [math.log(c[metric] / b[metric]) for c, b in zip(candidate, base, strict=True)]
        found.statistics[metric] = float(of_block(logs))
        found.excesses[metric] = excess(candidate, metric) - excess(base, metric)
    return found


def times(turn: Turn) -> set[str]:
    """The metrics of which a turn gives a time."""
    return {metric for metric in turn if metric != CALL and not metric.startswith(MEAN)}


def check_times(turn: Turn, name: str, metrics: Collection[str], pace: float) -> None:
    """Raise ValueError if a side cannot have given this turn. metrics: those of which it must have
    a time. pace: the seconds of a call by the judge's clock, at most."""
    if times(turn) != set(metrics):
        given = ", ".join(turn) or "nothing"
        raise ValueError(f"a turn of the {name} gave {given}, not {', '.join(metrics)}")
    for metric, value in turn.items():
        if not (is_number(value) and value > 0):
            raise ValueError(f"{metric}: {value!r} s in a turn of the {name} is no time")
    longest = max(turn.get(CALL, 0.0), *(turn[metric] for metric in metrics))
    if longest * TURN_RATIO < pace:
        raise ValueError(
            f"a turn of the {name} says {longest:.3g} s for a call, which took {pace:.3g} s by the "
            "judge's clock: its clock is wrong"
        )


def check_idle(worked: Mapping[str, float], passed: Mapping[str, float]) -> None:
    """Raise ValueError if a side worked while the other one was timed: it made that one slower, or
    finished late what its own calls had left. By side, in the other side's turns: worked, its
    seconds of processor time; passed, the seconds that these turns took."""
    for side, seconds in worked.items():
        if seconds > IDLE_SHARE * passed[side] + IDLE_SECONDS:
            raise ValueError(
                f"the {side} worked for {seconds:.3g} s of the {passed[side]:.3g} s in which the "
                "other side was timed: each call must finish its work and end its threads"
            )


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
    return mean(excesses) - float(scipy.stats.t.isf(level, len(excesses) - 1)) * _error(excesses)


def slower(excesses: Sequence[float], tests: int, accepted: float = 0.0) -> bool:
    """Whether a share of the turns is certainly slower."""
    return lowest(excesses, tests) > math.log1p(MARGIN + accepted)


def suspect(excesses: Sequence[float]) -> bool:
    """Whether more blocks are needed to tell."""
    found = mean(excesses)
    return found > SUSPECT and found > ERRORS * _error(excesses)


def _error(excesses: Sequence[float]) -> float:
    return max(stdev(excesses), LEAST_SPREAD) / math.sqrt(len(excesses))


def new_seed() -> int:
    """A seed of values that no process has seen."""
    return secrets.randbelow(2**40)


def held(
    base: Sequence[Sequence[int]], candidate: Sequence[Sequence[int]], alike: bool
) -> list[tuple[int, int, int, bool]]:
    """Which calls of a block are compared with eager's results: the side (0 base, 1 candidate), the
    place of the turn, the call, and whether it is compared with float64's results instead.

    base, candidate: for each turn what the side noted of its calls; nothing where bits may differ.
    alike: both gave the same bits when they were verified, so calls that differ are chosen too.
    """
    last, random = len(base) - 1, secrets.SystemRandom()

    def some(side: int, exact: bool) -> tuple[int, int, int, bool]:
        return side, random.randint(0, last), random.randrange(2**20), exact

    found = [some(0, False), some(1, False), some(1, True)]
    if not alike:
        return [*found, some(1, False)]
    differ = [
        (place, call)
        for place, both in enumerate(zip(base, candidate, strict=True))
        for call, (one, other) in enumerate(zip(*both, strict=False))
        if one != other
    ]
    for place, call in random.sample(differ, min(MOST_HELD, len(differ))):
        found += [(side, place, call, True) for side in (0, 1)]
    return found
