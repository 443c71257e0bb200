"""Blocks of benchmarks, taken in waves: as many fresh pairs as may work at the same time each give
one block of every benchmark that is undecided. So a look costs one start of processes, not four.

All pairs make ready at once what fits into the device's memory. Then, with nothing else at work,
one after the other is timed. Then all compare results of their timed calls, and make the next
ready.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from typing import NamedTuple

from tinyllama.harness.gate.benchmarks import Stopped
from tinyllama.harness.gate.exact import layout_figures, layouts_missed
from tinyllama.harness.gate.figures import Series
from tinyllama.harness.gate.memory import ready_bytes
from tinyllama.harness.gate.pair import BASE, CANDIDATE, WARM_UP, Pair, SideError, Taken
from tinyllama.harness.gate.run import Run
from tinyllama.harness.gate.setting import BenchmarkState
from tinyllama.harness.gate.turns import Block
from tinyllama.harness.records.verdict import Figure, Outcome, Verdict

LOOKED = 10.0  # seconds between checks for other work on the device
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
    """A pair in a wave. blocks: by benchmark, what it gave. some: of the batch. ready: what of
    these is ready to be timed. taken: turns whose results were not compared yet, and of what."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.blocks: dict[str, Timed] = {}
        self.some: Sequence[BenchmarkState] = []
        self.ready: list[BenchmarkState] = []
        self.taken: list[tuple[BenchmarkState, Taken, list[Figure]]] = []


Batch = list[list[BenchmarkState]]  # of each pair, what it makes ready before any of it is timed


def batches(which: Sequence[BenchmarkState], count: int, total: float) -> list[Batch]:
    """What ``count`` pairs make ready at the same time, in ``total`` bytes of the device's memory.
    A training step has a batch of its own, which is one of the last: it may change what a process
    does by default."""
    found: list[Batch] = []
    free: list[float] = []
    ops = [one for one in which if not one.benchmark.factory]
    # Neighbours of the list are made ready at the same time: cases of an op take about as long.
    for step, number in itertools.product(range(len(ops)), range(count)):
        one = ops[(step + number) % len(ops)]
        needed = 2 * ready_bytes(one.benchmark)
        place = next((at for at, left in enumerate(free) if needed <= left), len(free))
        if place == len(free):
            found.append([[] for _ in range(count)])
            free.append(total)
        found[place][number].append(one)
        free[place] -= needed
    return found + [[[one]] * count for one in which if one.benchmark.factory]


class _Wave:
    """Blocks of some benchmarks, each by a pair of its own."""

    def __init__(self, run: Run, which: Sequence[BenchmarkState], count: int) -> None:
        self.run, self.which, self.count = run, which, count
        self.blocks: list[dict[str, Timed]] = []
        self.verdicts = {one.name: one.verdict for one in which}
        self.paces: dict[str, dict[str, float]] = {}
        self.looked = time.monotonic()
        self.crowded = False  # several benchmarks are in hand, and have the memory

    def take(self) -> str | None:
        """Take the blocks; returns what disturbed the device meanwhile."""
        run, count = self.run, self.count
        with run.pairs(count) as pairs, ThreadPoolExecutor(count) as pool:
            for pair in pairs:
                pair.processor = run.setting.processor
                pair.leading = (BASE, CANDIDATE)[run.launches % 2]
                run.launches += 1
            places = [_Place(pair) for pair in pairs]
            self.blocks = [place.blocks for place in places]
            # Where one pair works at a time, so does one benchmark: there is nothing to gain.
            total = run.ready.total if run.setting.at_once > 1 else 0.0
            disturbed, warm_up = None, max(WARM_UP, run.effort.first)
            waiting = deque(batches(self.which, count, total))
            while not disturbed and (waiting or any(place.some for place in places)):
                batch = waiting.popleft() if waiting else [[]] * count
                ahead = run.setting.ahead() if self._another_follows(batch) else nullcontext()
                # All is compared first: the next batch needs the memory.
                with run.part("compare results"), ahead:
                    waiting += self._alone(list(pool.map(self._compared, places)))
                self.crowded = sum(map(len, batch)) > 1
                with run.part("make ready"):
                    left = pool.map(self._make_ready, places, batch, [warm_up] * count)
                    waiting += self._alone(list(left))
                disturbed = self._time(places)
                waiting += self._alone(map(self._left, places))
                warm_up = WARM_UP
            self._add_seconds(pairs)
            return disturbed or self._disturbed(places)

    def _another_follows(self, batch: Batch) -> bool:
        """Whether no batch is left in this wave while other benchmarks are undecided: pairs of the
        next wave may then use the device for the first time."""
        return not any(batch) and len(self.run.undecided()) > len(self.which)

    @contextmanager
    def _in_hand(self, one: BenchmarkState, what: str) -> Iterator[None]:
        """An error becomes the benchmark's verdict. If memory runs out while several share it, the
        benchmark is postponed."""
        with self.run.errors_as_verdict(one), one.takes(what):
            try:
                yield
            except SideError as error:
                if not (error.memory and self.crowded):
                    raise

    def _left(self, place: _Place) -> list[BenchmarkState]:
        """Of a pair that failed, what it had in hand but for what has its verdict now."""
        if not (place.pair.failed and place.some):
            return []
        place.pair.close()  # it may hold much memory; others take its place when it works again
        left = [one for one in place.some if one.name not in place.blocks and self._goes_on(one)]
        place.some, place.ready, place.taken = [], [], []
        return left

    def _alone(self, left: Iterable[Sequence[BenchmarkState]]) -> list[Batch]:
        """Batches in which a pair has one benchmark alone. left: of each pair."""
        each = list(left)
        return [
            [[one] if number == mine else [] for number in range(self.count)]
            for mine, some in enumerate(each)
            for one in some
        ]

    def _time(self, places: Sequence[_Place]) -> str | None:
        """Time what is ready, with nothing else at work; returns what disturbed the device."""
        for step in itertools.zip_longest(*(place.ready for place in places)):
            for place, one in zip(places, step, strict=True):
                if one is not None and self._goes_on(one) and not place.pair.failed:
                    with self._in_hand(one, "time"):
                        place.taken.append((one, *self._timed(place.pair, one)))
            if time.monotonic() - self.looked >= LOOKED and (found := self._disturbed(places)):
                return found
        return None

    def _disturbed(self, places: Sequence[_Place]) -> str | None:
        self.looked = time.monotonic()
        with self.run.part("watch"):
            return self.run.setting.watch.during([id for one in places for id in one.pair.pids()])

    def _goes_on(self, one: BenchmarkState) -> bool:
        """Whether a benchmark had no error meanwhile."""
        return one.verdict is self.verdicts[one.name]

    def _make_ready(
        self, place: _Place, some: Sequence[BenchmarkState], warm_up: float
    ) -> list[BenchmarkState]:
        """Make benchmarks ready; an error is a verdict. Returns what is left of a pair that
        failed."""
        place.some, place.ready = some, []
        for one in filter(self._goes_on, some):
            with self._in_hand(one, "make ready"):
                self.run.working(place.pair).make_ready(one.benchmark, one.proofs, warm_up)
                place.ready.append(one)
                warm_up = WARM_UP
            if place.pair.failed:
                break
        return self._left(place)

    def _compared(self, place: _Place) -> list[BenchmarkState]:
        """Compare the results of the last turns; as `_make_ready`."""
        taken = [one.name for one, *_ in place.taken]
        for one in place.ready:
            if one.name not in taken and not place.pair.failed:  # another pair failed with it
                with suppress(SideError):
                    place.pair.end(one.benchmark)
        place.ready = []
        for one, turns, layouts in place.taken:
            with self._in_hand(one, "compare"), self.run.exact.held(one.exact_bytes):
                block = place.pair.compared(one.benchmark, turns, alike=_same_bits(one))
                place.blocks[one.name] = Timed(block, self.paces[one.name], layouts)
            if place.pair.failed:
                break
        place.taken = []
        return self._left(place)

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
                found, bars = pair.layouts(one.benchmark), one.benchmark.layouts
                missed = layouts_missed(found, bars, accepted)
                base = pair.layouts(one.benchmark, BASE, missed)
            layouts = layout_figures(found, bars, accepted, base)
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
