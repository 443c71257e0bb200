"""Blocks of benchmarks, taken in waves: as many fresh pairs as may work at the same time each give
one block of every benchmark that is undecided. So a look costs one start of processes, not four.

Each pair makes a benchmark ready; then, with nothing else at work, one after the other is timed.
Then all compare results of their timed calls, and make the next benchmark ready at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import NamedTuple

from tinyllama.harness.gate.exact import layout_figures
from tinyllama.harness.gate.figures import Series
from tinyllama.harness.gate.listing import Stopped
from tinyllama.harness.gate.pair import BASE, CANDIDATE, WARM_UP, Pair, Taken
from tinyllama.harness.gate.run import Run
from tinyllama.harness.gate.setting import BenchmarkState
from tinyllama.harness.gate.turns import Block
from tinyllama.harness.records.verdict import Figure, Outcome, Verdict

LOOKED = 10.0  # seconds between looks for other work on the device
MAX_DISCARDED = 2  # waves on a disturbed device; one more, and the verdict is BUSY


class Timed(NamedTuple):
    """What a block gives a benchmark: its turns; by side a call's seconds; figures."""

    block: Block
    paces: dict[str, float]
    layouts: list[Figure]


def wave(
    run: Run, which: Sequence[BenchmarkState], count: int, of: Callable[[Series], list[float]]
) -> int:
    """At most ``count`` blocks of some benchmarks, whose statistics go where ``of`` says; returns
    how many were taken, 0 where they are discarded. Raises Stopped."""
    before = [one.verdict for one in which]
    waves = math.ceil(count / run.setting.at_once)  # of about the same size
    taking = _Wave(run, which, math.ceil(count / waves))
    if disturbed := taking.take():
        run.disturbed, run.discarded = run.disturbed + 1, run.discarded + len(taking.blocks)
        run.setting.say(f"blocks are discarded ({len(taking.blocks)}): {disturbed}")
        if run.disturbed > MAX_DISCARDED:
            raise Stopped(Verdict("device", Outcome.BUSY, disturbed))
        return 0
    for one, verdict in zip(which, before, strict=True):
        if one.verdict is not verdict:
            continue  # an error meanwhile
        with run.errors_as_verdict(one):
            for block in taking.blocks:
                _keep(run, one, block[one.name], of)
    return len(taking.blocks)


def _keep(run: Run, one: BenchmarkState, timed: Timed, of: Callable[[Series], list[float]]) -> None:
    one.paces = timed.paces
    one.figures += timed.layouts
    for metric, value in timed.block.statistics.items():
        series = run.series(one, metric)
        of(series).append(value)
        if of(series) is series.statistics:
            series.excesses.append(timed.block.excesses[metric])


class _Place:
    """A pair in a wave. blocks: by benchmark, what it gave. taken: the turns whose results were not
    compared yet, and of what."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.blocks: dict[str, Timed] = {}
        self.taken: tuple[BenchmarkState, Taken, list[Figure]] | None = None


class _Wave:
    """Blocks of some benchmarks, each by a pair of its own."""

    def __init__(self, run: Run, which: Sequence[BenchmarkState], count: int) -> None:
        self.run, self.count = run, count
        # Steps take longest to be made ready: all pairs do that at the same time.
        self.ops = [one for one in which if not one.benchmark.factory]
        self.steps = [one for one in which if one.benchmark.factory]
        self.blocks: list[dict[str, Timed]] = []
        self.verdicts = {one.name: one.verdict for one in which}
        self.paces: dict[str, dict[str, float]] = {}
        self.holding = Lock()  # a comparison with float64 may take much of the device's memory

    def take(self) -> str | None:
        """Take the blocks; returns what disturbed the device meanwhile."""
        run, count, disturbed = self.run, self.count, None
        with run.pairs(count) as pairs, ThreadPoolExecutor(count) as pool:
            for pair in pairs:
                pair.processor = run.setting.processor
                pair.leading = (BASE, CANDIDATE)[run.launches % 2]
                run.launches += 1
            places = [_Place(pair) for pair in pairs]
            self.blocks = [place.blocks for place in places]
            looked, steps = time.monotonic(), self._order()
            for number, some in enumerate(steps):
                warm_up = WARM_UP if number else max(WARM_UP, run.effort.first)
                with run.part("compare and make ready"):
                    ready = list(pool.map(self._between, places, some, [warm_up] * count))
                for place, one, is_ready in zip(places, some, ready, strict=True):
                    if is_ready and self._goes_on(one):
                        with run.errors_as_verdict(one), one.takes("time"):
                            place.taken = one, *self._timed(place.pair, one)
                if number + 1 < len(steps) and time.monotonic() - looked < LOOKED:
                    continue
                looked = time.monotonic()
                with run.part("watch"):
                    disturbed = run.setting.watch.during([id for p in pairs for id in p.pids()])
                if disturbed:
                    break
            else:
                with run.part("compare and make ready"):
                    list(pool.map(self._compared, places))
            self._add_seconds(pairs)
        return disturbed

    def _order(self) -> list[list[BenchmarkState]]:
        """In each step, the benchmark of each pair. Neighbours of the list are made ready at the
        same time, since cases of an op take about as long."""
        many = len(self.ops)
        by_op = [
            [self.ops[(step + number) % many] for number in range(self.count)]
            for step in range(many)
        ]
        return [*by_op, *([one] * self.count for one in self.steps)]

    def _goes_on(self, one: BenchmarkState) -> bool:
        """Whether a benchmark had no error meanwhile."""
        return one.verdict is self.verdicts[one.name]

    def _between(self, place: _Place, one: BenchmarkState, warm_up: float) -> bool:
        """Compare the results of the last turns, then make a benchmark ready. Returns whether it
        is; an error is its verdict."""
        self._compared(place)
        if not self._goes_on(one):
            return False
        ready = False
        with self.run.errors_as_verdict(one), one.takes("make ready"):
            self.run.working(place.pair).make_ready(one.benchmark, one.proofs, warm_up)
            ready = True
        return ready

    def _compared(self, place: _Place) -> None:
        taken, place.taken = place.taken, None
        if taken is None:
            return
        one, turns, layouts = taken
        with self.run.errors_as_verdict(one), one.takes("compare"):
            with self.holding:
                block = place.pair.compared(one.benchmark, turns, alike=_same_bits(one))
            place.blocks[one.name] = Timed(block, self.paces[one.name], layouts)

    def _timed(self, pair: Pair, one: BenchmarkState) -> tuple[Taken, list[Figure]]:
        """The turns of a benchmark that is ready. In its first block also the seconds of a call by
        this process's clock, and the times on other layouts."""
        run, layouts = self.run, list[Figure]()
        if not one.series and one.name not in self.paces:
            paces = {}
            if not one.benchmark.factory:
                with run.part("judge's clock"):
                    paces = {side: pair.pace(side, one.benchmark) for side in (BASE, CANDIDATE)}
            accepted = run.allowed(one)("layouts")[0]
            with run.part("layouts"):
                found = pair.layouts(one.benchmark)
            layouts = layout_figures(found, one.benchmark.layouts, accepted)
            self.paces[one.name] = paces
        paces = self.paces.setdefault(one.name, one.paces)
        return pair.take(one.benchmark, run.effort.of(one.benchmark), paces), layouts

    def _add_seconds(self, pairs: Sequence[Pair]) -> None:
        for name, seconds in (item for pair in pairs for item in pair.seconds.items()):
            part = f"{self.run.stage}: {name}"
            self.run.seconds[part] = self.run.seconds.get(part, 0.0) + seconds


def _same_bits(one: BenchmarkState) -> bool:
    """Whether both sides gave the same bits when they were verified."""
    if one.benchmark.factory:
        return False
    each = (
        [{name: proof.digest for name, proof in proofs.items()} for proofs in one.proofs[side]]
        for side in (BASE, CANDIDATE)
    )
    base, candidate = each
    return base == candidate
