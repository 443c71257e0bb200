"""The processes of a comparison, and waves of blocks: several fresh pairs start together, and each
gives one block of every undecided benchmark.

So four blocks need one start of processes, not four. All pairs make a benchmark ready at once. Then
one pair after the other is timed, with nothing else at work, and holds the results of a timed call
to the reference in float64, which takes much memory.
"""

import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from tinyllama.harness.gate.benchmarks import BASE, CANDIDATE, Stopped
from tinyllama.harness.gate.metric import Block, ClockError
from tinyllama.harness.gate.pair import WARM_UP, Effort, Pair, SideError
from tinyllama.harness.gate.setting import BenchmarkState, Setting, Stages
from tinyllama.harness.machine.worker import all_ended
from tinyllama.harness.records.verdict import Outcome, Verdict

LOOKED = 10.0  # seconds between checks for other work on the device


class Processes:
    """Pairs of processes for a comparison, how long its stages took, and what their errors mean.

    stage: the current one. launched: how many blocks so far.
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
            with setting.pairs(self.trees, setting.device, count) as pairs:
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
            accused = error.wrong and error.side == CANDIDATE  # an error of the base accuses nobody
            outcome = Outcome.WRONG_RESULT if accused else Outcome.NOT_JUDGED
            state.settle(outcome, f"{error.side}: {error.words}")
        except ValueError as error:
            state.settle(Outcome.MISSING, str(error))


@dataclass
class Launch:
    """What a pair of a wave gives a benchmark. first_calls: seconds by side."""

    first_calls: dict[str, float]
    block: Block


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
                        for pair in pairs:  # together they do not find the memory
                            self._take([pair], state, pool, WARM_UP)
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

        def make_ready(pair: Pair) -> dict[str, float]:
            return processes.working(pair).make_ready(benchmark, state.proofs, warm_up)

        launches = []
        with ExitStack() as stack:
            for pair in pairs:
                stack.enter_context(pair.ending(benchmark))
            futures = [pool.submit(make_ready, pair) for pair in pairs]
            wait(futures)  # no pair may still work while another is timed, or after an error
            first_calls = [future.result() for future in futures]
            for pair, seconds in zip(pairs, first_calls, strict=True):
                launches.append(Launch(seconds, self._timed(pair, state)))
                pair.hold_results(benchmark)
        self.launches.setdefault(state.name, []).extend(launches)

    def _timed(self, pair: Pair, state: BenchmarkState) -> Block:
        """The turns of a benchmark that is ready. Its first block also times calls by this
        process's clock."""
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


def wave_size(blocks: int, at_once: int) -> int:
    """How many of so many blocks the next wave takes: all waves are of about the same size."""
    return math.ceil(blocks / math.ceil(blocks / at_once))
