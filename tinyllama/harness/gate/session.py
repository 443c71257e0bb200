"""The whole comparison of a candidate with a base.

    listed      the benchmarks of both sides               -> MISSING
    sources     the source that each benchmark runs, and
                the files that it opens                    -> IDENTICAL, nothing is timed
    prepared    compiled from cold, inputs, counts         -> IDENTICAL kernels; exact figures; NEW
    verified    results held to float64, once a side       -> WRONG RESULT
    blocks      fresh pairs, a look after every fourth     -> SAME, FASTER, SLOWER, INCONCLUSIVE
    confirmed   SLOWER is measured again in fresh pairs    -> SLOWER, or INCONCLUSIVE
    decided     once one is SLOWER                         -> the others are NOT DECIDED
    attributed  profiles of both sides of what is SLOWER   -> which kernels changed

Whatever keeps a benchmark from being compared is its verdict: nothing is left out in silence.
"""

import secrets
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from tinyllama.harness.gate import blocks, preparing, waves
from tinyllama.harness.gate.attribution import PROFILES, moved
from tinyllama.harness.gate.benchmarks import Stopped
from tinyllama.harness.gate.figures import Series
from tinyllama.harness.gate.pair import BASE, CANDIDATE
from tinyllama.harness.gate.run import Run, has_outcome
from tinyllama.harness.gate.setting import BenchmarkState
from tinyllama.harness.gate.subject import DEVICE
from tinyllama.harness.records.verdict import Outcome, Verdict

RENAMED = "MISSING: if it is one of them, renamed, restore its name"


class Session(Run):
    """One comparison. `run` returns a verdict on each benchmark of either side."""

    def run(self) -> list[Verdict]:
        try:
            self._decide()
            with self.timed("attribute"):
                _attribute(self)
            self.untampered()
        except Stopped as stop:
            self.others.append(stop.verdict)
            for one in self.undecided():
                text = f"not measured: {stop.verdict.text}"
                self.settle(one, stop.verdict.outcome, text)
        if any(verdict.outcome is Outcome.MISSING for verdict in self.verdicts()):
            for one in self.new.values():
                if has_outcome(one, Outcome.NEW):
                    self.settle(one, Outcome.NO_BASELINE, f"new, while others are {RENAMED}")
        return list(self.verdicts())

    def blocks(self, count: int) -> Iterator[tuple[str, dict[str, dict[str, float]]]]:
        """Block after block, up to a count: the name of its wave, and the statistics of the
        benchmarks that can be timed.

        Raises Stopped where none can be. Those that failed have their verdicts in `found`.
        """
        self._prepare()
        while count > 0 and self.undecided():
            name = secrets.token_hex(8)
            size = min(self.setting.at_once, count)
            taken = waves.wave(self, self.undecided(), size, _statistics)
            count -= taken
            for place in range(-taken, 0) if self.undecided() else ():  # discarded blocks have none
                yield (
                    name,
                    {
                        one.name: {m: series.statistics[place] for m, series in one.series.items()}
                        for one in self.undecided()
                    },
                )

    def _decide(self) -> None:
        """Time the ops whose own files differ first: a merge that is SLOWER is mostly decided by
        them."""
        with self.timed("prepare"), self.pairs() as (pair,):
            preparing.list_benchmarks(self, pair)
            nearest = preparing.nearest(self)
            apart = nearest if self.setting.at_once == 1 else []  # else all at the same time
            preparing.prepare(self, pair, apart)
        if nearest and blocks.decide(self, nearest):
            return
        if apart and self.unsettled():
            with self.timed("prepare"), self.pairs() as (pair,):
                preparing.prepare(self, pair)
        blocks.decide(self)

    def _prepare(self) -> None:
        with self.timed("prepare"), self.pairs() as (pair,):
            preparing.list_benchmarks(self, pair)
            preparing.prepare(self, pair)

    def report(self) -> dict[str, Any]:
        """All that was measured, for a file. seconds: by stage. blocks: discarded ones too."""
        return {
            "base": self.setting.base.label,
            "candidate": self.setting.candidate.label,
            "versions": self.versions,
            "seconds": self.seconds,
            "blocks": self.launches,
            "discarded": self.discarded,
            "left_out": self.left_out,
            "unidentified": dict(self.unidentified),
            "judge_changed": [asdict(one) for one in self.changed],
            "benchmarks": {n: one.report() for n, one in {**self.found, **self.new}.items()},
            "others": [str(verdict) for verdict in self.others],
        }


def _statistics(series: Series) -> list[float]:
    return series.statistics


def _attribute(run: Run) -> None:
    """Find out which kernels of the SLOWER benchmarks changed."""
    slower = [one for one in run.found.values() if has_outcome(one, Outcome.SLOWER)]
    if not slower:
        return
    try:
        with run.pairs() as (pair,):
            for one in slower:
                with run.errors_as_verdict(one, settle=False):
                    pair = run.working(pair)
                    pair.begin(one.benchmark)
                    base, candidate = (
                        pair.ask(side, "profiles", one.name, PROFILES) for side in (BASE, CANDIDATE)
                    )
                    one.moved = moved(base, candidate, timed=_slower_on_the_device(one))
                    pair.end(one.benchmark)
    except Stopped as stop:  # no pair, so none was attributed; no verdict changes
        for one in slower:
            one.moved = [f"not attributed: {stop.verdict.text}"]
    for one in slower:
        assert one.verdict is not None
        run.settle(one, Outcome.SLOWER, "\n    ".join([one.verdict.text, *one.moved]))


def _slower_on_the_device(one: BenchmarkState) -> bool:
    return any(f.metric == DEVICE and f.outcome is Outcome.SLOWER for f in one.figures)
