"""Which pairs of processes work when, and where: pairs that are started ahead, and waves of blocks.

A wave is as many fresh pairs as may work at the same time; each gives one block of every benchmark
that is undecided. So a look costs one start of processes, not four. All pairs make a benchmark
ready at once. Then, with nothing else at work, one after the other is timed. Then all hold the
results of a timed call to the reference.
"""

from __future__ import annotations

import math
import os
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from tinyllama.harness.gate.benchmarks import BASE, CANDIDATE, Registered
from tinyllama.harness.gate.counters import layout_figures, layouts_missed
from tinyllama.harness.gate.device_guard import identity
from tinyllama.harness.gate.metric import Block, ClockError
from tinyllama.harness.gate.pair import AT_ONCE, WARM_UP, Pair, SideError, Tree
from tinyllama.harness.machine.worker import close_all
from tinyllama.harness.records.verdict import Figure

if TYPE_CHECKING:
    from tinyllama.harness.gate.session import Session
    from tinyllama.harness.gate.setting import BenchmarkState

PROCESSORS = 8  # from so many on, importing on most of them disturbs no turn
AHEAD = 4  # pairs; six make blocks no faster
MEMORY = 16 * 2**30  # bytes of a GPU for each pair at work
PRELOAD = ("torch._dynamo",)  # an optimizer imports it: 1.5 s of the 3.3 s of a step
LOOKED = 10.0  # seconds between checks for other work on the device


# -- pairs ----------------------------------------------------------------------------------------


def pairs_at_once(device: torch.device) -> int:
    """How many pairs work at once on this machine; only one is ever timed."""
    processors = len(os.sched_getaffinity(0))
    if processors < PROCESSORS:
        return 1
    fit = AT_ONCE
    if device.type != "cpu":
        fit = torch.cuda.get_device_properties(device).total_memory // MEMORY
    return max(1, min(AT_ONCE, processors // 3, fit))


def timing_processor(device: torch.device) -> int:
    """The processor that both sides are pinned to. It is not the first, which does the system's own
    work, and mostly differs between GPUs, each of which may have a gate at work."""
    first, *others = sorted(os.sched_getaffinity(0))
    return others[zlib.crc32(identity(device).encode()) % len(others)] if others else first


@contextmanager
def opened(
    trees: Sequence[Tree], device: torch.device, registered: Registered, count: int = 1
) -> Iterator[list[Pair]]:
    """Fresh pairs, ready to be asked, for a `with` statement. Raises SideError."""
    pairs = [Pair(trees, device, registered) for _ in range(count)]
    try:
        open_all(pairs)
        yield pairs
    finally:
        close_pairs(pairs)


def open_all(pairs: Sequence[Pair]) -> None:
    """Open several pairs at once. Raises the SideError of the first that cannot be opened."""
    with ThreadPoolExecutor(len(pairs)) as pool:
        list(pool.map(lambda pair: pair.open(), pairs))


def close_pairs(pairs: Sequence[Pair]) -> None:
    close_all([worker for pair in pairs for worker in pair.workers.values()])


class PairPool:
    """`opened`, for machines with spare processors: the next pairs start while some are used.

    Until they are asked they only import, without touching a device, on other processors than the
    timed one. The last pairs end while the next ones begin. pairs: how many start ahead; importing
    takes longer than a block of one benchmark.
    """

    def __init__(self, timed: int, pairs: int) -> None:
        self.pairs = pairs
        self._timed = timed
        self._next: deque[Pair] = deque()
        self._pool = ThreadPoolExecutor(1)
        self._ending: Future[None] | None = None

    @contextmanager
    def __call__(
        self, trees: Sequence[Tree], device: torch.device, registered: Registered, count: int = 1
    ) -> Iterator[list[Pair]]:
        pairs = [
            self._next.popleft() if self._next else Pair(trees, device, registered)
            for _ in range(count)
        ]
        try:
            with _without(self._timed):  # they import while these are opened
                while len(self._next) < self.pairs:
                    self._next.append(Pair(trees, device, registered, PRELOAD))
            open_all(pairs)
            yield pairs
        finally:
            self._wait()
            self._ending = self._pool.submit(close_pairs, pairs)

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Open the pairs that start ahead during a `with` block, in which nothing is timed, and
        have them use the device for the first time."""

        def first_use(pair: Pair) -> None:
            with suppress(SideError):  # of whoever asks it next
                pair.open()
                pair.each("warm_up_blas")

        with ThreadPoolExecutor(max(1, len(self._next))) as pool:
            opening = pool.map(first_use, self._next)
            yield
        list(opening)

    def _wait(self) -> None:
        ending, self._ending = self._ending, None
        if ending is not None:
            ending.result()

    def close(self) -> None:
        """End all processes."""
        try:
            self._wait()
        finally:
            for pair in self._next:
                pair.discard()
            self._pool.shutdown()


@contextmanager
def launcher(timed: int) -> Iterator[Callable[..., AbstractContextManager[list[Pair]]]]:
    """A function that opens pairs on this machine. timed: both sides are pinned to it."""
    processors = len(os.sched_getaffinity(0))
    if processors < PROCESSORS:
        yield opened
        return
    pool = PairPool(timed, min(AHEAD, processors // 3))
    try:
        yield pool
    finally:
        pool.close()


@contextmanager
def _without(processor: int) -> Iterator[None]:
    """Keep processes that start meanwhile off a processor."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before - {processor})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


# -- waves ----------------------------------------------------------------------------------------


@dataclass
class Launch:
    """What a pair of a wave gives a benchmark. first_calls: by side, their seconds."""

    first_calls: dict[str, float]
    block: Block | None = None  # once it was taken


@dataclass
class Wave:
    """Blocks of some benchmarks, each by a pair of its own.

    launches: by benchmark, of those whose every pair gave a block. layouts: by benchmark, the
    figures on other layouts, of a first block. disturbed: why the blocks do not count. accused:
    that of which a side's clock disagreed with this process's; base_accused: it was the base's.
    """

    session: Session
    count: int
    launches: dict[str, list[Launch]] = field(default_factory=dict)
    layouts: dict[str, list[Figure]] = field(default_factory=dict)
    disturbed: str | None = None
    accused: BenchmarkState | None = None
    base_accused: bool = False
    _looked: float = field(default_factory=time.monotonic)

    def take(self, states: Sequence[BenchmarkState]) -> None:
        """Take a block of each benchmark from each pair, until the device is disturbed."""
        session, setting = self.session, self.session.setting
        with session.pairs(self.count) as pairs, ThreadPoolExecutor(self.count) as pool:
            for pair in pairs:
                pair.processor = setting.processor
                pair.leading = (BASE, CANDIDATE)[session.launched % 2]
                session.launched += 1
            warm_up = max(WARM_UP, session.effort.first)
            for state in states:
                last = state is states[-1]
                ahead = setting.ahead() if last and session.others_wait(states) else nullcontext()
                with session.errors_as_verdict(state):
                    try:
                        self._take(pairs, state, pool, warm_up, ahead)
                    except SideError as error:
                        if not (error.memory and self.count > 1):
                            raise
                        self._alone(pairs, state)
                    except ClockError as error:
                        self.disturbed, self.accused = str(error), state
                        self.base_accused = error.side == BASE
                if self.disturbed or self._is_disturbed(pairs, late=True):
                    break
                warm_up = WARM_UP
            self._is_disturbed(pairs, late=False)

    def _take(
        self,
        pairs: Sequence[Pair],
        state: BenchmarkState,
        pool: ThreadPoolExecutor,
        warm_up: float,
        ahead: AbstractContextManager[None],
    ) -> None:
        """A block of a benchmark from each pair. Raises the first error, after all pairs have
        ended with it."""
        session, benchmark = self.session, state.benchmark

        def make_ready(pair: Pair) -> Launch:
            pair = session.working(pair)
            return Launch(pair.make_ready(benchmark, state.proofs, warm_up))

        try:
            with session.part("make ready"):
                launches = _all(pool, make_ready, pairs)
            for pair, launch in zip(pairs, launches, strict=True):
                launch.block = self._timed(pair, state)
            with session.part("compare results"), ahead:
                _all(pool, lambda pair: pair.hold_results(benchmark), pairs)
        except BaseException:
            for pair in pairs:
                if not pair.failed:
                    with suppress(SideError):
                        pair.end(benchmark)
            raise
        _all(pool, lambda pair: pair.end(benchmark), pairs)
        self.launches.setdefault(state.name, []).extend(launches)

    def _alone(self, pairs: Sequence[Pair], state: BenchmarkState) -> None:
        """The same, one pair after the other: together they do not find the memory."""
        self.launches.pop(state.name, None)
        with ThreadPoolExecutor(1) as pool:
            for pair in pairs:
                self._take([pair], state, pool, WARM_UP, nullcontext())

    def _timed(self, pair: Pair, state: BenchmarkState) -> Block:
        """The turns of a benchmark that is ready. In its first block also the seconds of a call by
        this process's clock, and the times on other layouts."""
        session, benchmark = self.session, state.benchmark
        if not state.series and state.name not in self.layouts:
            if not benchmark.factory:
                with session.part("judge's clock"):
                    state.paces = {side: pair.pace(side, benchmark) for side in (BASE, CANDIDATE)}
            accepted = session.allowed(state)("layouts")[0]
            with session.part("layouts"):
                ratios, bars = pair.layouts(benchmark), benchmark.layouts
                missed = layouts_missed(ratios, bars, accepted)
                base = pair.layouts(benchmark, BASE, missed)
            self.layouts[state.name] = layout_figures(ratios, bars, accepted, base)
        with session.part("turns"):
            return pair.take(benchmark, session.effort.of(benchmark), state.paces)

    def _is_disturbed(self, pairs: Sequence[Pair], *, late: bool) -> bool:
        """Whether other work was seen on the device. late: look only where that was long ago."""
        if not self.disturbed and not (late and time.monotonic() - self._looked < LOOKED):
            self._looked = time.monotonic()
            with self.session.part("watch"):
                pids = [pid for pair in pairs for pid in pair.pids()]
                self.disturbed = self.session.setting.watch.during(pids)
        return bool(self.disturbed)


def _all(
    pool: ThreadPoolExecutor, do: Callable[[Pair], object], pairs: Sequence[Pair]
) -> list[Any]:
    """What each pair gives, at once. Raises the first error once all have ended."""
    futures = [pool.submit(do, pair) for pair in pairs]
    for future in futures:
        future.exception()
    return [future.result() for future in futures]


def sizes(count: int, at_once: int) -> list[int]:
    """Waves of about the same size for so many blocks."""
    waves = math.ceil(count / at_once)
    return [count // waves + (number < count % waves) for number in range(waves)]
