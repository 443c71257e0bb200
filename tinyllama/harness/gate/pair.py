"""Two workers, one of each side, on one device: a block is one fresh launch of both.

Within a block the sides alternate A B B A: each comes first as often as second, and a drift slows
both alike. The side that waits is stopped. Compiled code is kept for each side from block to block;
processes are not.

Both sides are pinned to one processor, since they never work at the same time. With a processor
each, host time differs between them by the other work of those processors (docs/design.md).
"""

import math
import os
import random
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tinyllama.harness.gate.benchmarks import BASE, CANDIDATE, Benchmark, Registered
from tinyllama.harness.gate.metric import HOST, Block, Turn, check_turn, lacks
from tinyllama.harness.gate.snapshots import roots
from tinyllama.harness.gate.verification import hold_to_base
from tinyllama.harness.machine.worker import (
    KEEPS_FREED_MEMORY,
    Worker,
    WorkerError,
    caches_in,
    close_all,
)
from tinyllama.harness.measure.right_results import WrongResultError

FACTORY = "tinyllama.harness.gate.worker:Side"
WARM_UP = 0.02  # seconds of repeating before a benchmark is timed, on a device that is warm
AT_ONCE = 4  # pairs that work at once, at most
FEWEST, LONGEST = 8, 2.0  # pairs of a block at least; seconds after which these are enough
ROWS = 6  # pairs of turns of all work, where that has turns of its own: an even number
DRAWS = 2  # of values, on which a benchmark is verified before it is timed
READY = 600.0  # seconds for a benchmark to be compiled
TURN = 60.0  # seconds for anything else
# Calls in a row by this process's clock: readings at most; seconds, and calls, that are enough.
PACES, PACED, PACED_CALLS = 6, 0.05, 8
PACE_MORE = 1.25
_FRAME = re.compile(r'^  File "([^"<]+)", line (\d+), in', re.MULTILINE)  # of a traceback
_INSTALLED = re.compile(r"-packages/|/lib/python|/tinyllama/harness/")
_IMPORTED_LATE = ("torch.fx.experimental.symbolic_shapes",)  # by the first backward pass: a second


@dataclass(frozen=True)
class Tree:
    """What a side runs.

    name: BASE or CANDIDATE. root: its folder. python: its interpreter. label: the user's name for
    it. caches: the folder of its compiled code, which all its processes share. registered: what it
    gates. slowdowns: see `worker.Side`.
    """

    name: str
    root: Path
    python: str
    label: str
    caches: Path
    registered: Registered
    slowdowns: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Effort:
    """How much a block repeats.

    pairs: of turns, an even number; fewer for long calls. repeated: the same where the host is
    timed. first: seconds of warming up before the first benchmark of a block, in which clocks rise.
    """

    pairs: int
    repeated: int
    first: float

    @staticmethod
    def on(device: torch.device) -> "Effort":
        if device.type == "cpu":
            return Effort(pairs=20, repeated=20, first=0.3)
        return Effort(pairs=10, repeated=20, first=0.5)

    def of(self, benchmark: Benchmark) -> int:
        """The pairs of a benchmark."""
        return self.repeated if HOST in benchmark.slowdowns else self.pairs


class SideError(RuntimeError):
    """What went wrong on one side with one benchmark. memory: the device's was full, which may be
    due to other pairs."""

    def __init__(self, side: str, error: WorkerError) -> None:
        super().__init__(f"{side}: {error}")
        self.side, self.details, self.message = side, error.details, str(error)
        self.memory = error.raised(torch.OutOfMemoryError)
        self.wrong = error.raised(WrongResultError)

    @property
    def words(self) -> str:
        """What went wrong, and where: the last place in code of the tree; or the last line that the
        process printed, unless it says the same."""
        frames = _FRAME.findall(self.details) if not self.wrong else []
        if places := [f"{file}:{line}" for file, line in frames if not _INSTALLED.search(file)]:
            return f"{self.message} ({places[-1]})"
        last = self.details.strip().splitlines()[-1:]
        more = last and not last[0].endswith(self.message.rpartition("Error: ")[2])
        return f"{self.message} ({last[0]})" if more else self.message


def new_seed() -> int:
    """A seed of values that no process has seen."""
    return secrets.randbelow(2**40)


class Pair:
    """The workers of both sides. `ask` asks one of them, `ask_both` both at once.

    processor: both are pinned to it in their turns, unless it is None. leading: the side that is
    asked first, which alternates from block to block. preload: further modules that the workers
    import before they are asked.
    """

    def __init__(
        self,
        trees: Sequence[Tree],
        device: torch.device,
        preload: Sequence[str] = (),
    ) -> None:
        self.trees = {tree.name: tree for tree in trees}
        self.device, self.preload = device, preload
        self.workers: dict[str, Worker] = {}
        self.unstarted: SideError | None = None
        self.failed = self.stopping = False
        self.processor: int | None = None
        self.leading = BASE
        self._start()

    # -- processes --------------------------------------------------------------------------

    def _start(self) -> None:
        self.hash_seed = random.randrange(2**32)  # one for both, so that sets are ordered alike
        for name, tree in self.trees.items():
            try:
                self.workers[name] = self.started(tree)
            except WorkerError as error:
                self.unstarted = SideError(name, error)
                return

    def started(self, tree: Tree) -> Worker:
        """A process of a side. Raises WorkerError."""
        env = caches_in(tree.caches) | KEEPS_FREED_MEMORY
        env |= {"PYTHONHASHSEED": str(self.hash_seed)}
        # Idle threads spin, which slows the other side, and other pairs that work at once.
        shared = len(os.sched_getaffinity(0)) // (2 * AT_ONCE)
        env["OMP_NUM_THREADS"] = "1" if self.device.type == "cpu" else str(max(1, shared))
        if tree.registered.own:
            inherited = filter(None, [os.environ.get("PYTHONPATH")])
            env["PYTHONPATH"] = os.pathsep.join([*map(str, roots(tree.root)), *inherited])
        modules = (FACTORY.partition(":")[0], tree.registered.package, *_IMPORTED_LATE)
        return Worker(
            tree.name,
            python=tree.python,
            cwd=tree.root,
            preload=(*modules, *self.preload),
            env=env,
            stoppable=True,
        )

    def restart(self) -> None:
        """Replace the processes of both sides after one failed."""
        self.close()
        self.workers, self.unstarted, self.failed = {}, None, False
        self._start()
        self.open()

    def open(self) -> None:
        """Make the `Side` of both workers. Raises SideError."""
        if self.unstarted is not None:
            self.failed = True
            raise self.unstarted

        def make(name: str) -> None:
            tree = self.trees[name]
            arguments = {"registered": tree.registered, "slowdowns": dict(tree.slowdowns)}
            try:
                self.workers[name].make(
                    "side", FACTORY, timeout=READY, device=str(self.device), **arguments
                )
            except WorkerError as error:
                raise self._error(name, error) from error

        self._at_once(self.order, make)

    def pids(self) -> list[int]:
        return [worker.pid for worker in self.workers.values()]

    def discard(self) -> None:
        """End an unused pair without waiting for its imports."""
        for worker in self.workers.values():
            worker.kill()
        self.close()

    def close(self) -> None:
        close_all(self.workers.values())

    # -- asking -----------------------------------------------------------------------------

    @property
    def order(self) -> list[str]:
        """The sides, the leading one first."""
        return sorted(self.workers, key=lambda name: name != self.leading)

    def ask(self, name: str, method: str, *args: Any, timeout: float = TURN) -> Any:
        try:
            return self.workers[name].call("side", method, *args, timeout=timeout)
        except WorkerError as error:
            raise self._error(name, error) from error
        finally:
            if self.stopping:
                self.workers[name].stop()

    def ask_both(self, method: str, *args: Any, timeout: float = TURN) -> dict[str, Any]:
        """Ask both sides at the same time; nothing is timed then."""
        return self._at_once(
            self.order, lambda name: self.ask(name, method, *args, timeout=timeout)
        )

    def ask_of(
        self, benchmark: Benchmark, method: str, *args: Any, timeout: float = TURN
    ) -> dict[str, Any]:
        """The same of a benchmark, on the sides that have it."""
        return self._at_once(
            self.sides(benchmark),
            lambda name: self.ask(name, method, benchmark.name, *args, timeout=timeout),
        )

    def sides(self, benchmark: Benchmark) -> list[str]:
        """The sides that have a benchmark, the leading one first."""
        return [CANDIDATE] if benchmark.new else self.order

    def _at_once(self, sides: Sequence[str], do: Callable[[str], Any]) -> dict[str, Any]:
        with ThreadPoolExecutor(2) as pool:
            answers_by_side = {name: pool.submit(do, name) for name in sides}
        return {name: answer.result() for name, answer in answers_by_side.items()}

    def _error(self, name: str, error: WorkerError) -> SideError:
        """A side's error. The processes of both are then replaced, unless memory was lacking: that
        is given back when the benchmark ends."""
        side_error = SideError(name, error)
        self.failed = self.failed or not side_error.memory
        return side_error

    # -- a benchmark ------------------------------------------------------------------------

    def begin(self, benchmark: Benchmark) -> dict[str, float]:
        """Prepare a benchmark on its sides; returns the seconds of their first calls."""
        return self.ask_of(benchmark, "begin", tuple(benchmark.slowdowns), timeout=READY)

    def interpreted(self, benchmark: Benchmark) -> str:
        """A kernel that is interpreted on one of its sides; empty if there is none."""
        return next(filter(None, self.ask_of(benchmark, "interpreted").values()), "")

    def end(self, benchmark: Benchmark) -> None:
        self.ask_of(benchmark, "end")

    @contextmanager
    def ending(self, benchmark: Benchmark) -> Iterator[None]:
        """End a benchmark after a `with` block, also after an error: others need its memory."""
        try:
            yield
        except BaseException:
            if not self.failed:
                with suppress(SideError):
                    self.end(benchmark)
            raise
        self.end(benchmark)

    def verify(
        self, benchmark: Benchmark, *, base_result: bool = True, removed: bool = False
    ) -> dict[str, Any]:
        """Hold the results of a benchmark's sides to float64 on draws of values that neither has
        seen, and the candidate's to the base's reference; returns what each side proves of the last
        draw. Not ``base_result``: the base gives its reference alone. removed: the candidate may
        lack results. Raises SideError."""
        if benchmark.factory:  # it has values of its own, and is held to its own side's reference
            sides = self.sides(benchmark) if base_result else [CANDIDATE]
            return self._at_once(
                sides, lambda side: self.ask(side, "verify", benchmark.name, 0, timeout=READY)
            )
        for seed in (new_seed() for _ in range(DRAWS)):
            proofs = {}
            # One after the other: in float64 a large case takes much of the device's memory.
            for side in self.sides(benchmark):
                method = "verify" if base_result or side == CANDIDATE else "reference"
                proofs[side] = self.ask(side, method, benchmark.name, seed, timeout=READY)
            self._hold_to_base(proofs, removed=removed)
        return proofs

    def hold_results(self, benchmark: Benchmark) -> None:
        """The same, of the call that the last turn kept."""
        if not benchmark.factory:
            self._hold_to_base(self.ask_of(benchmark, "proofs", timeout=READY))

    @staticmethod
    def _hold_to_base(proofs: Mapping[str, Any], *, removed: bool = False) -> None:
        if BASE not in proofs:
            return
        try:
            hold_to_base(proofs[BASE], proofs[CANDIDATE], removed=removed)
        except WrongResultError as error:
            types = [f"{WrongResultError.__module__}.{WrongResultError.__qualname__}"]
            raise SideError(CANDIDATE, WorkerError(str(error), types=types)) from error

    def make_ready(
        self, benchmark: Benchmark, proofs: Mapping[str, Any], warm_up: float
    ) -> dict[str, float]:
        """Prepare a benchmark on its sides for its turns, and warm up; returns the seconds of
        their first calls. Raises SideError."""
        seconds = self.begin(benchmark)

        def ready(side: str) -> None:
            standard = proofs[side] if benchmark.factory else None
            self.ask(side, "make_ready", benchmark.name, standard, warm_up, timeout=READY)

        self._at_once(self.sides(benchmark), ready)
        return seconds

    def pace(self, name: str, benchmark: Benchmark) -> float:
        """Seconds of a call of a side, by the clock of this process: an upper bound."""
        calls, fastest = 2, math.inf  # the first two say how many calls are long enough
        for _ in range(PACES):
            with self._timing():
                self.ask(name, "ready", benchmark.name)
                start = time.perf_counter()
                self.ask(name, "paced", benchmark.name, calls, timeout=READY)
                took = time.perf_counter() - start
            fastest = min(fastest, took / calls)
            if took >= PACED and calls >= PACED_CALLS:
                break
            # Asking takes time too, so the next reading has more calls than this says.
            calls = max(PACED_CALLS, math.ceil(PACE_MORE * PACED * calls / took))
        return fastest

    # -- a block ----------------------------------------------------------------------------

    def take(self, benchmark: Benchmark, pairs: int, paces: Mapping[str, float]) -> Block:
        """The turns of a benchmark on its sides, which must be ready.

        pairs: an even number. paces: by side, what `pace` said. Raises SideError, ValueError where
        a side does not give a time of every metric, and ClockError.
        """
        with self._timing():
            return self._turns(benchmark, pairs, paces)

    @contextmanager
    def _timing(self) -> Iterator[None]:
        """Pin both sides to one processor while one of them is timed, and stop the other, with any
        work that it left running."""
        if self.processor is not None:
            self.ask_both("pin", self.processor)
        for worker in self.workers.values():
            worker.stop()
        self.stopping = True
        try:
            yield
        finally:
            self.stopping = False
            for worker in self.workers.values():
                worker.resume()
            if self.processor is not None and not self.failed:
                self.ask_both("pin", None)

    def _turns(self, benchmark: Benchmark, pairs: int, paces: Mapping[str, float]) -> Block:
        turns: dict[str, list[Turn]] = {BASE: [], CANDIDATE: []}
        first, call_number = new_seed(), secrets.randbelow(2**20)
        sides = self.sides(benchmark)

        def figure(name: str, seed: int, last: bool) -> None:
            number, pace = call_number if last else None, paces.get(name, 0.0)
            turns[name].append(self._turn(name, benchmark, seed, number, pace))

        def row(name: str, seed: int, last: bool) -> None:
            turns[name].append(self._row(name, benchmark, seed, lacking[name]))

        for name in reversed(sides):  # a process's first turn is colder and does not count
            self._turn(name, benchmark, first)
        self._alternate(sides, pairs, figure)
        lacking = {name: lacks(turns[name][-1], benchmark.slowdowns) for name in sides}
        sides = [name for name in sides if lacking[name]]
        for name in reversed(sides):
            self._row(name, benchmark, first, lacking[name])
        figures = any(reading in benchmark.slowdowns for name in sides for reading in lacking[name])
        self._alternate(sides, pairs if figures else ROWS, row)
        return Block.of(turns[BASE], turns[CANDIDATE], benchmark.slowdowns)

    @staticmethod
    def _alternate(
        sides: Sequence[str], pairs: int, take: Callable[[str, int, bool], None]
    ) -> None:
        """Take turns A B B A, with new values for each pair, until there are enough. take: gets the
        side, the seed of the values, and whether this is the last pair."""
        began = time.monotonic()
        for index in range(pairs):
            enough = index % 2 == 1 and index + 1 >= FEWEST and time.monotonic() - began > LONGEST
            last = enough or index == pairs - 1
            seed = new_seed()
            for name in sides[:: 1 if index % 2 == 0 else -1]:
                take(name, seed, last)
            if last:
                return

    def _turn(
        self,
        name: str,
        benchmark: Benchmark,
        seed: int,
        call_number: int | None = None,
        pace: float = 0.0,
    ) -> Turn:
        """A turn of one side. seed: of its values. Raises ValueError for anything that is none."""
        turn: Turn = self.ask(name, "turn", benchmark.name, seed, call_number)
        metrics = [metric for metric in benchmark.slowdowns if metric in turn]
        check_turn(turn, name, metrics or benchmark.slowdowns, pace)
        return turn

    def _row(self, name: str, benchmark: Benchmark, seed: int, readings: Sequence[str]) -> Turn:
        """A turn of what the other turns lack."""
        turn: Turn = self.ask(name, "row", benchmark.name, seed)
        check_turn(turn, name, readings, 0.0)  # a pace has the host's time in it
        return turn
