"""A wave of blocks: as many fresh pairs as may work at the same time each give one block of every
benchmark that is undecided.

So a look costs one start of processes, not four. All pairs make a benchmark ready at once. Then,
with nothing else at work, one after the other is timed. Then all hold the results of a timed call
to the reference.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from tinyllama.harness.gate.benchmarks import BASE, CANDIDATE
from tinyllama.harness.gate.counters import layout_figures, layouts_missed
from tinyllama.harness.gate.metric import Block, ClockError
from tinyllama.harness.gate.pair import WARM_UP, Effort, Pair, SideError
from tinyllama.harness.gate.setting import BenchmarkState, Setting
from tinyllama.harness.records.verdict import Figure

LOOKED = 10.0  # seconds between checks for other work on the device


class Comparison(Protocol):
    """What a wave needs of the comparison that it is a part of (`session.Session`)."""

    setting: Setting
    effort: Effort
    launched: int

    def pairs(self, count: int = 1) -> AbstractContextManager[list[Pair]]: ...
    def working(self, pair: Pair) -> Pair: ...
    def part(self, name: str) -> AbstractContextManager[None]: ...
    def errors_as_verdict(self, state: BenchmarkState) -> AbstractContextManager[None]: ...
    def allowed(self, state: BenchmarkState) -> Callable[[str], tuple[float, int]]: ...
    def others_wait(self, states: Sequence[BenchmarkState]) -> bool: ...


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

    session: Comparison
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
