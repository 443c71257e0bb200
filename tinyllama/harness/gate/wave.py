"""The processes of a comparison, and waves of blocks: as many fresh pairs as may work at the same
time each give one block of every benchmark that is undecided.

So a look costs one start of processes, not four. All pairs make a benchmark ready at once. Then
one after the other, with nothing else at work, is timed and holds the results of a timed call to
the reference in float64, which takes much memory.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from tinyllama.harness.gate.benchmarks import BASE, CANDIDATE, Stopped
from tinyllama.harness.gate.metric import Block, ClockError
from tinyllama.harness.gate.pair import WARM_UP, Effort, Pair, SideError
from tinyllama.harness.gate.setting import BenchmarkState, Setting, Stages
from tinyllama.harness.machine.worker import all_ended
from tinyllama.harness.records.verdict import Outcome, Verdict

LOOKED = 10.0  # seconds between checks for other work on the device


class Processes:
    """Pairs of processes for a comparison, how long its stages took, and what their errors mean.

    stage: that of now. launched: blocks.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.trees = (setting.base, setting.candidate)
        self.effort = setting.effort or Effort.on(setting.device)
        self.seconds = Stages(setting.seconds)  # those before the comparison too
        self.stage, self.launched = "", 0

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the seconds of a `with` block to those of a stage."""
        self.stage = stage
        self.setting.doing(f"{stage}: starting both sides")
        with self.seconds.of(stage):
            yield

    @contextmanager
    def pairs(self, count: int = 1) -> Iterator[list[Pair]]:
        """Fresh pairs. Where a side cannot start, the comparison stops."""
        setting = self.setting
        try:
            with setting.pairs(self.trees, setting.device, setting.registered, count) as pairs:
                yield pairs
        except SideError as error:
            if all_ended():
                raise
            raise Stopped(Verdict(error.side, Outcome.NOT_JUDGED, error.words)) from error

    def working(self, pair: Pair) -> Pair:
        """The pair, with fresh workers where one of them failed."""
        if pair.failed:
            pair.restart()
        return pair

    @contextmanager
    def errors_as_verdict(self, state: BenchmarkState) -> Iterator[None]:
        """An error with one benchmark is its verdict; the others continue."""
        block = f", block {self.launched}" if self.launched else ""
        self.setting.doing(f"{self.stage}: {state.name}{block}")
        try:
            yield
        except SideError as error:
            if all_ended():
                raise
            accused = error.wrong and error.side == CANDIDATE  # the base's error is not its fault
            outcome = Outcome.WRONG_RESULT if accused else Outcome.NOT_JUDGED
            state.settle(outcome, f"{error.side}: {error.words}")
        except ValueError as error:
            state.settle(Outcome.MISSING, str(error))


@dataclass
class Launch:
    """What a pair of a wave gives a benchmark. first_calls: by side, their seconds."""

    first_calls: dict[str, float]
    block: Block | None = None  # once it was taken


@dataclass
class Wave:
    """Blocks of some benchmarks, each by a pair of its own.

    launches: by benchmark, of those whose every pair gave a block. disturbed: why the blocks do not
    count.
    """

    processes: Processes
    count: int
    launches: dict[str, list[Launch]] = field(default_factory=dict)
    disturbed: str | None = None
    _looked: float = field(default_factory=time.monotonic)

    def take(self, states: Sequence[BenchmarkState]) -> None:
        """Take a block of each benchmark from each pair, until the device is disturbed."""
        processes = self.processes
        with processes.pairs(self.count) as pairs, ThreadPoolExecutor(self.count) as pool:
            for pair in pairs:
                pair.processor = processes.setting.processor
                pair.leading = (BASE, CANDIDATE)[processes.launched % 2]
                processes.launched += 1
            warm_up = max(WARM_UP, processes.effort.first)
            for state in states:
                with processes.errors_as_verdict(state):
                    try:
                        self._take(pairs, state, pool, warm_up)
                    except SideError as error:
                        if not (error.memory and self.count > 1):
                            raise
                        self._alone(pairs, state)
                    except ClockError as error:
                        self.disturbed = f"{state.name}: {error}"
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
    ) -> None:
        """A block of a benchmark from each pair. Raises the first error, after all pairs have
        ended with it."""
        processes, benchmark = self.processes, state.benchmark

        def make_ready(pair: Pair) -> Launch:
            pair = processes.working(pair)
            return Launch(pair.make_ready(benchmark, state.proofs, warm_up))

        with ExitStack() as stack:
            for pair in pairs:
                stack.enter_context(pair.ending(benchmark))
            launches = _all(pool, make_ready, pairs)
            for pair, launch in zip(pairs, launches, strict=True):
                launch.block = self._timed(pair, state)
                pair.hold_results(benchmark)
        self.launches.setdefault(state.name, []).extend(launches)

    def _alone(self, pairs: Sequence[Pair], state: BenchmarkState) -> None:
        """The same, one pair after the other: together they do not find the memory."""
        self.launches.pop(state.name, None)
        with ThreadPoolExecutor(1) as pool:
            for pair in pairs:
                self._take([pair], state, pool, WARM_UP)

    def _timed(self, pair: Pair, state: BenchmarkState) -> Block:
        """The turns of a benchmark that is ready. In its first block also the seconds of a call by
        this process's clock."""
        processes, benchmark = self.processes, state.benchmark
        if not (state.paces or benchmark.factory):
            state.paces = {side: pair.pace(side, benchmark) for side in pair.sides(benchmark)}
        return pair.take(benchmark, processes.effort.of(benchmark), state.paces)

    def _is_disturbed(self, pairs: Sequence[Pair], *, late: bool) -> bool:
        """Whether other work was seen on the device. late: look only where that was long ago."""
        if not self.disturbed and not (late and time.monotonic() - self._looked < LOOKED):
            self._looked = time.monotonic()
            pids = [pid for pair in pairs for pid in pair.pids()]
            self.disturbed = self.processes.setting.guard.during(pids)
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
