"""The metrics of a benchmark over its blocks, and the figures that they give.

Each metric has two readings in a block. One is the figure: a call's device time between two queued
events, or the host's time of the fastest of some calls. The other is all work: of the device until
it has nothing left to do, or of the host for all calls, divided by their number. It sees what the
figure does not: other streams, destructors of results, a turn's first call, every fifth call. It
decides with margins and an error rate of its own, and only on SLOWER.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, median, stdev

import numpy as np
import scipy
import torch

from tinyllama.harness.gate.sequential_test import (
    CONFIRM_BLOCKS,
    LOOKS,
    Call,
    Rule,
    Spread,
    bounds,
    confirmed,
    decide,
    far_above,
    of_block,
)
from tinyllama.harness.records.results import is_number
from tinyllama.harness.records.verdict import Figure, Outcome

DEVICE, HOST = "device_seconds", "host_seconds"
ALL_WORK = "all work of "  # before a metric: its other reading
CALL = "a call"  # on a GPU, the longer of its times on both clocks
MARGINS = {DEVICE: 0.005, HOST: 0.02}
MARGIN_ON_CPU = 0.02

MOST = 2.0  # times the median: what a turn's reading of all work counts at most
ALPHA = 5e-4  # of a false SLOWER by all work in a merge, beside that of the figures
MARGIN = 0.01  # of all work; 20% of calls that are 50% slower make it 10% slower
LEAST_SPREAD = 0.005  # of all work between blocks
SUSPECT, SUSPECT_ERRORS = 0.04, 2.0  # a slowdown, and standard errors: more blocks are taken
CLOCK_RATIO = 4.0  # what a call takes by the judge's clock, over what its worker says


def margin_of(metric: str, device: torch.device) -> float:
    """The largest slowdown of a metric on a device that counts as none."""
    return MARGIN_ON_CPU if device.type == "cpu" else MARGINS[metric]


Turn = Mapping[str, float]


class ClockError(ValueError):
    """A worker's clock and the judge's disagree: the machine is loaded, or that clock is wrong."""


def lacks(turn: Turn, metrics: Collection[str]) -> list[str]:
    """The readings of some metrics that a turn lacks: they need turns of their own."""
    readings = [reading for metric in metrics for reading in (metric, ALL_WORK + metric)]
    return [reading for reading in readings if reading not in turn]


def check_turn(turn: Turn, side: str, readings: Collection[str], pace: float) -> None:
    """Raise ValueError for a turn without a time of each of these readings, and ClockError where a
    call takes much longer by the judge's clock. pace: its seconds by that, an upper bound."""
    if not {*readings} <= {*turn} <= {CALL, *readings, *(ALL_WORK + name for name in readings)}:
        raise ValueError(
            f"a turn of the {side} gave {', '.join(turn) or 'nothing'}, not {', '.join(readings)}"
        )
    for metric, seconds in turn.items():
        if not (is_number(seconds) and seconds > 0):
            raise ValueError(f"{metric}: {seconds!r} s in a turn of the {side} is no time")
    longest = max(turn.values())
    if longest * CLOCK_RATIO < pace:
        text = (
            f"a turn of the {side} says {longest:.3g} s for a call, the judge's clock {pace:.3g} s"
        )
        raise ClockError(text)


@dataclass(frozen=True)
class Block:
    """What the turns of one launch of both sides give: by metric, logarithms of candidate over
    base, of the figure (`sequential_test.of_block`) and of all work; and the median of the
    candidate's seconds."""

    statistics: Mapping[str, float]
    all_work: Mapping[str, float]
    seconds: Mapping[str, float]

    @staticmethod
    def of(base: Sequence[Turn], candidate: Sequence[Turn], metrics: Collection[str]) -> "Block":
        """The block of these turns of both sides, in order; of the candidate's alone if the base
        has none. Turns of all work alone are among them."""
        seconds = {metric: median(_readings(candidate, metric)) for metric in metrics}
        if not base:
            return Block({}, {}, seconds)
        logs = {
            metric: np.log(_readings(candidate, metric)) - np.log(_readings(base, metric))
            for metric in metrics
        }
        statistics = {metric: float(of_block(ratios)) for metric, ratios in logs.items()}
        works = {m: math.log(_work(candidate, m) / _work(base, m)) for m in metrics}
        return Block(statistics, works, seconds)


def _readings(turns: Sequence[Turn], reading: str) -> list[float]:
    return [turn[reading] for turn in turns if reading in turn]


def _work(turns: Sequence[Turn], metric: str) -> float:
    """The mean of all work over the turns of a side. One that was interrupted counts little."""
    works = _readings(turns, ALL_WORK + metric)
    most = MOST * median(works)
    return mean(min(work, most) for work in works)


@dataclass
class Series:
    """The blocks of a metric, and those that confirm a slowdown.

    accepted: the slowdown that the accepted file allows, which the rule includes. all_work,
    again_work: the other reading of the same blocks.
    """

    rule: Rule
    history: Spread
    accepted: float = 0.0
    statistics: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    all_work: list[float] = field(default_factory=list)
    again_work: list[float] = field(default_factory=list)

    def look(self) -> Call:
        """The decision by the blocks so far; their number must be one of `LOOKS`."""
        return decide(self.statistics, self.rule, self.history)

    # -- all work ---------------------------------------------------------------------------

    @property
    def _error(self) -> float:
        return max(stdev(self.all_work), LEAST_SPREAD) / math.sqrt(len(self.all_work))

    @property
    def _least_work(self) -> float:
        """The lower bound of all work, on Student's t over the blocks of today alone."""
        level = ALPHA / self.rule.tests / len(LOOKS)
        quantile = float(scipy.stats.t.isf(level, len(self.all_work) - 1))
        return mean(self.all_work) - quantile * self._error

    @property
    def suspect(self) -> bool:
        """Whether more blocks are needed to tell of all work."""
        slowdown = mean(self.all_work)
        return slowdown > max(math.log1p(SUSPECT + self.accepted), SUSPECT_ERRORS * self._error)

    def work_figure(self, metric: str) -> Figure | None:
        """The figure of all work that is slower; None where that is not certain."""
        far = self._is_far(self.all_work)
        if not (far or self._least_work > math.log1p(MARGIN + self.accepted)):
            return None
        least = min(self.all_work) if far else self._least_work
        ratio = math.exp(mean(self.all_work))
        text = (
            f"{ALL_WORK}{metric} {_percent(ratio)} [at least {_percent(math.exp(least))}] in "
            f"{len(self.all_work)} blocks: first call, every call, other streams, destructors"
        )
        return Figure(f"{ALL_WORK}{metric}", Outcome.SLOWER, text, ratio=ratio)

    # -- the figure -------------------------------------------------------------------------

    def figure(self, metric: str, call: Call) -> Figure:
        """The outcome, with the slowdown, the interval that decides, and the number of blocks."""
        look = LOOKS.index(len(self.statistics))
        interval = bounds(np.asarray(self.statistics), look, self.rule, self.history)
        low = interval.green_low if call in (Call.SAME, Call.FASTER) else interval.slower_low
        if call is Call.SLOWER and self._is_far(self.statistics):
            low = np.maximum(low, min(self.statistics))
        ratio, lowest, highest = (
            float(np.exp(x)) for x in (interval.mean, low, interval.green_high)
        )
        text = (
            f"{metric} {_percent(ratio)} [{_percent(lowest)}, {_percent(highest)}] "
            f"in {len(self.statistics)} blocks"
        )
        if self.accepted:
            text += f", {self.accepted:.1%} accepted"
        if call is Call.MORE:
            rule = self.rule
            text += f", neither certainly under {rule.tolerance:.1%} nor over {rule.margin:.1%}"
        outcome = Outcome.INCONCLUSIVE if call is Call.MORE else Outcome[call.name]
        return Figure(metric, outcome, text, ratio=ratio)

    # -- in fresh processes -----------------------------------------------------------------

    def needs_again(self, *, of_work: bool) -> int:
        """How many fresh blocks are still needed to confirm a slowdown of the figure, or of all
        work."""
        first = len(self.again) < LOOKS[0] or self._is_far(
            self.again_work if of_work else self.again
        )
        return max(0, (LOOKS[0] if first else CONFIRM_BLOCKS) - len(self.again))

    def _is_far(self, blocks: Sequence[float]) -> bool:
        """Whether so many blocks as of the first look are all beyond a large effect."""
        return len(blocks) == LOOKS[0] and bool(far_above(blocks, self.rule) < 0)

    def confirm(self, figure: Figure) -> Figure:
        """A figure that is SLOWER, confirmed by fresh blocks or INCONCLUSIVE, as `calibrate`
        simulates it."""
        of_work = figure.metric.startswith(ALL_WORK)
        blocks = self.again_work if of_work else self.again
        first = self.all_work if of_work else self.statistics
        again = _percent(math.exp(mean(blocks))) if blocks else "no"
        history = self.history
        if of_work or not history.freedom:  # the spread of the blocks that were slower
            history = Spread(stdev(first), len(first) - 1)
        if len(blocks) in (LOOKS[0], CONFIRM_BLOCKS) and confirmed(blocks, self.rule, history):
            return replace(figure, text=f"{figure.text}, confirmed by {again} in fresh processes")
        text = f"{figure.text}, not confirmed: {again} in {len(blocks)} fresh blocks"
        return replace(figure, outcome=Outcome.INCONCLUSIVE, text=text)


def _percent(ratio: float) -> str:
    return f"{ratio - 1:+.2%}"
