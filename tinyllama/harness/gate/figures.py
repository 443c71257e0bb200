"""One metric of one benchmark over its blocks, and the figure that they give."""

import math
from dataclasses import dataclass, field, replace
from statistics import mean

import numpy as np

from tinyllama.harness.gate import turns
from tinyllama.harness.gate.decision import LOOKS, Call, Rule, Spread, bounds, confirmed, decide
from tinyllama.harness.records.verdict import Figure, Outcome


@dataclass
class Series:
    """The statistics of its blocks, and of the blocks that confirm a slowdown.

    accepted: the slowdown that the accepted file allows, which the rule includes. excesses: of
    slow turns, by block (`tinyllama.harness.gate.turns`).
    """

    rule: Rule
    history: Spread
    accepted: float = 0.0
    statistics: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    excesses: list[float] = field(default_factory=list)

    def look(self) -> Call:
        """The decision by the blocks so far; their number must be one of `LOOKS`."""
        return decide(self.statistics, self.rule, self.history)

    @property
    def suspect(self) -> bool:
        """Whether a share of the turns may be slower, so that more blocks are needed to tell."""
        return turns.suspect(self.excesses)

    def slow_turns(self, metric: str) -> Figure | None:
        """The figure of a share of turns that is slower; None where that is not certain."""
        if not turns.slower(self.excesses, self.rule.tests, self.accepted):
            return None
        found = [mean(self.excesses), turns.lowest(self.excesses, self.rule.tests)]
        ratio, least = map(math.exp, found)
        text = (
            f"{metric}: a share of its turns is slower: the mean call by {_percent(ratio)} [at "
            f"least {_percent(least)}] beside the median, in {len(self.excesses)} blocks"
        )
        return Figure(f"slow turns of {metric}", Outcome.SLOWER, text, ratio=ratio)

    def figure(self, metric: str, call: Call) -> Figure:
        """The outcome, with the slowdown, the interval that decides, and the number of blocks."""
        look = LOOKS.index(len(self.statistics))
        found = bounds(np.asarray(self.statistics), look, self.rule, self.history)
        low = found.slower_low if call is Call.SLOWER else found.green_low
        ratio, lowest, highest = (float(np.exp(x)) for x in (found.mean, low, found.green_high))
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

    def confirm(self, figure: Figure) -> Figure:
        """The figure, confirmed by fresh blocks or INCONCLUSIVE, as a certificate simulates it."""
        again = _percent(float(np.exp(np.mean(self.again)))) if self.again else "no"
        known = self.history if self.history.freedom else self._own()
        if self.again and bool(confirmed(self.again, self.rule, known)):
            return replace(figure, text=f"{figure.text}, confirmed by {again} in fresh processes")
        text = f"{figure.text}, not confirmed: {again} in {len(self.again)} fresh blocks"
        return replace(figure, outcome=Outcome.INCONCLUSIVE, text=text)

    def _own(self) -> Spread:
        """The spread of the blocks that were slower, for a device without a history."""
        return Spread(float(np.std(self.statistics, ddof=1)), len(self.statistics) - 1)


def _percent(ratio: float) -> str:
    return f"{ratio - 1:+.2%}"
