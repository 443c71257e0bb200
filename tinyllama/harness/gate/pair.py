"""Two workers, one of each side, on one device: a block is one fresh launch of both.

Within a block the sides alternate A B B A: each comes first as often as second, and a drift slows
both alike. Compiled code is kept for each side from block to block; processes are not.

Both sides are pinned to one processor, since they never work at the same time. With a processor
each, host time differs between them by the other work of those processors (docs/design.md).
"""

import math
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tinyllama.harness.gate import turns
from tinyllama.harness.gate.benchmarks import Benchmark, Registered
from tinyllama.harness.gate.sources import roots
from tinyllama.harness.gate.stages import Stages
from tinyllama.harness.gate.subject import HOST
from tinyllama.harness.gate.turns import Block
from tinyllama.harness.machine.worker import (
    KEEPS_FREED_MEMORY,
    Worker,
    WorkerError,
    caches_in,
    close_all,
)
from tinyllama.harness.measure.op_contender import WrongResultError
from tinyllama.harness.records.entries import Ratio
from tinyllama.harness.records.results import is_number

FACTORY = "tinyllama.harness.gate.side:Side"
BASE, CANDIDATE = "base", "candidate"
WARM_UP = 0.02  # seconds of repeating before a benchmark is timed, on a device that is warm
MOST = 4  # pairs that work at once
FEWEST, LONGEST = 8, 2.0  # pairs of a block at least; seconds after which these are enough
READY = 600.0  # seconds for a benchmark to be compiled
TURN = 60.0  # seconds for anything else
# A side's clock and that of this process: calls in a row, and how much a turn may be below these.
PACES, PACED, PACED_CALLS = 6, 0.2, 8  # readings at most; seconds, and calls, that are enough
PACE_MORE = 1.25
CLOCK_RATIO, CLOCK_SECONDS = 1.25, 0.05  # of what it says; for asking it


@dataclass(frozen=True)
class Tree:
    """A side before it runs.

    label: the user's name for it. caches: the folder of its compiled code. kernels: that of
    Triton's, which all its processes share (`gate.once`); None: that of ``caches``. slowed, usual:
    see `Side`.
    """

    name: str
    root: Path
    python: str
    label: str
    caches: Path
    slowed: Mapping[str, float] = field(default_factory=dict)
    usual: Mapping[str, float] = field(default_factory=dict)
    kernels: Path | None = None


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


@dataclass(frozen=True)
class Taken:
    """Turns of both sides. seeds: of the values of each pair of turns, drawn when it began. took:
    by side, the seconds of its turns."""

    seeds: Sequence[int]
    took: Mapping[str, Sequence[Mapping[str, float]]]


class SideError(RuntimeError):
    """What went wrong on one side with one benchmark. memory: the device's was full, which may be
    due to other pairs."""

    def __init__(self, side: str, error: WorkerError) -> None:
        super().__init__(f"{side}: {error}")
        self.memory = error.raised(torch.OutOfMemoryError)
        self.side = side
        self.wrong = error.raised(WrongResultError)
        self.details = error.details


class Pair:
    """The workers of both sides. `ask` asks one of them, `each` both at once.

    processor: both are pinned to it in their turns, unless it is None. leading: the side that is
    asked first, which the session alternates. preload: further modules that the workers import
    before they are asked. seconds: of parts of blocks.
    """

    def __init__(
        self,
        trees: Sequence[Tree],
        device: torch.device,
        registered: Registered,
        preload: Sequence[str] = (),
    ) -> None:
        self.trees = {tree.name: tree for tree in trees}
        self.device, self.registered, self.preload = device, registered, preload
        self.workers: dict[str, Worker] = {}
        self.unstarted: SideError | None = None
        self.failed = self.is_open = False
        self.processor: int | None = None
        self.leading = BASE
        self.seconds = Stages()
        self._start()

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
        env |= {"PYTHONHASHSEED": str(self.hash_seed), "PYTHONDONTWRITEBYTECODE": "1"}
        # Idle threads spin, which slows the other side, and other pairs that work at once.
        shared = len(os.sched_getaffinity(0)) // (2 * MOST)
        env["OMP_NUM_THREADS"] = "1" if self.device.type == "cpu" else str(max(1, shared))
        if self.registered.own is not None:
            given = filter(None, [os.environ.get("PYTHONPATH")])
            env["PYTHONPATH"] = os.pathsep.join([*map(str, roots(tree.root)), *given])
        modules = (_MODULE, self.registered.package, *_IMPORTED_LATE, *self.preload)
        return Worker(tree.name, python=tree.python, cwd=tree.root, preload=modules, env=env)

    def compile_apart(self, suffix: str) -> None:
        """Compile into folders of its own from now on. Raises SideError."""
        self.trees = {
            name: replace(tree, caches=tree.caches.with_name(f"{tree.caches.name}-{suffix}"))
            for name, tree in self.trees.items()
        }
        self._both(lambda name: self.ask(name, "use_caches", str(self.trees[name].caches)))

    def merge_caches(self, trees: Sequence[Tree]) -> None:
        """Copy what was compiled apart into the folders of these trees. The copies may name files
        of the originals, which stay."""
        for tree in trees:
            if (apart := self.trees[tree.name].caches).is_dir():
                shutil.copytree(apart, tree.caches, dirs_exist_ok=True)

    def restart(self) -> None:
        """Replace the processes of both sides after one failed."""
        self.close()
        self.workers, self.unstarted, self.failed, self.is_open = {}, None, False, False
        self._start()
        self.open()

    def open(self) -> None:
        """Make the `Side` of both workers, if there is none yet. Raises SideError."""
        if self.is_open:
            return
        if self.unstarted is not None:
            self.failed = True
            raise self.unstarted

        def make(name: str) -> None:
            tree, base = self.trees[name], self.trees[BASE]
            shared = name == CANDIDATE and base.kernels and base.python == tree.python
            make_side(
                self.workers[name],
                self.device,
                self.registered,
                slowed=dict(tree.slowed),
                usual=dict(tree.usual),
                kernels=str(tree.kernels or ""),
                base_kernels=str(base.kernels if shared else ""),
            )

        self._both(make)
        self.is_open = True

    def ask(self, name: str, method: str, *args: Any, timeout: float = TURN) -> Any:
        try:
            return self.workers[name].call("side", method, *args, timeout=timeout)
        except WorkerError as error:
            self.failed = True
            raise SideError(name, error) from error

    def each(self, method: str, *args: Any, timeout: float = TURN) -> dict[str, Any]:
        """Ask both sides at the same time; nothing is timed then."""
        return self._both(lambda name: self.ask(name, method, *args, timeout=timeout))

    def _both(self, do: Callable[[str], Any]) -> dict[str, Any]:
        with ThreadPoolExecutor(2) as pool:
            asked = {name: pool.submit(do, name) for name in self.order}
        found = {}
        for name, answer in asked.items():
            try:
                found[name] = answer.result()
            except WorkerError as error:
                self.failed = True
                raise SideError(name, error) from error
        return found

    def begin(self, benchmark: Benchmark) -> dict[str, float]:
        """Prepare a benchmark on both sides; returns the seconds of their first calls."""
        return self.each("begin", benchmark.name, timeout=READY)

    def end(self, benchmark: Benchmark) -> None:
        self.each("end", benchmark.name)

    def make_ready(self, benchmark: Benchmark, proofs: Mapping[str, Any], warm_up: float) -> None:
        """Prepare a benchmark on both sides for its turns, and warm up. Raises SideError."""
        self.begin(benchmark)

        def expect(side: str) -> None:
            self.ask(side, "expect", benchmark.name, proofs[side], warm_up, timeout=READY)

        self._both(expect)

    def take(self, benchmark: Benchmark, pairs: int, paces: Mapping[str, float]) -> Taken:
        """The turns of a benchmark on both sides, which must be ready.

        pairs: an even number. paces: by side, what `pace` said. Raises SideError, or ValueError
        where a side does not give a time of every metric.
        """
        with self.seconds.of("turns"), self._held():
            return self._turns(benchmark, pairs, paces)

    def compared(self, benchmark: Benchmark, taken: Taken, *, alike: bool) -> Block:
        """The block of these turns, once some of their results are compared with eager's and
        float64's. Other pairs may work meanwhile.

        alike: both sides gave the same bits when they were verified. Raises SideError.
        """
        if not benchmark.factory:
            with self.seconds.of("compare"):
                self._compare(benchmark, taken.seeds, alike)
        self.end(benchmark)
        return turns.block(taken.took[BASE], taken.took[CANDIDATE], benchmark.slowdowns)

    def _compare(self, benchmark: Benchmark, seeds: Sequence[int], alike: bool) -> None:
        """Choose calls of these turns, and compare their results with eager's and float64's."""
        notes = self.each("notes", benchmark.name, list(seeds))
        for side, place, call, exact in turns.held(notes[BASE], notes[CANDIDATE], alike):
            asked = (benchmark.name, seeds[place], call, exact)
            self.ask((BASE, CANDIDATE)[side], "hold", *asked, timeout=READY)

    def pace(self, name: str, benchmark: Benchmark) -> float:
        """Seconds of a call of a side, by the clock of this process: at most that.

        Raises ValueError for a side whose own clock says much less.
        """
        calls, fastest = 2, math.inf  # two of them tell how many are long enough
        for _ in range(PACES):
            self.ask(name, "ready", benchmark.name)
            start = time.perf_counter()
            said = self.ask(name, "paced", benchmark.name, calls, timeout=READY)
            took = time.perf_counter() - start
            fastest = min(fastest, took / calls)
            if not (is_number(said) and said * CLOCK_RATIO + CLOCK_SECONDS >= took):
                raise ValueError(
                    f"the {name} says that {calls} calls took {said!r} s, and {took:.3g} s passed: "
                    "its clock is wrong"
                )
            if took >= PACED and calls >= PACED_CALLS:
                break
            # A reading has all of the asking in it, so the next one has more calls than this says.
            calls = max(PACED_CALLS, math.ceil(PACE_MORE * PACED * calls / took))
        return fastest

    def layouts(
        self, benchmark: Benchmark, side: str = CANDIDATE, names: Sequence[str] | None = None
    ) -> dict[str, Ratio]:
        """How many times as long a side's calls take in the benchmark's layouts, or in some of
        them, as on contiguous inputs; their results must be expected. Raises SideError."""
        asked = tuple(benchmark.layouts if names is None else names)
        if not asked:
            return {}
        found: dict[str, Ratio] = self.ask(side, "layouts", benchmark.name, asked, timeout=READY)
        return found

    def alone(
        self, benchmark: Benchmark, effort: Effort
    ) -> tuple[dict[str, float], dict[str, int], dict[str, Ratio]]:
        """Of a benchmark that only the candidate has: the median seconds of some turns, by metric,
        each of which was held to float64; what is counted; and times on other layouts.

        Raises SideError, or ValueError where a turn does not give a time of every metric.
        """
        ask = partial(self.ask, CANDIDATE)
        ask("begin", benchmark.name, timeout=READY)
        counted = ask("counted", benchmark.name)
        proofs = ask("verify", benchmark.name, timeout=READY)
        ask("expect", benchmark.name, proofs, effort.first, timeout=READY)
        each = [turns.new_seed() for _ in range(1 + effort.of(benchmark))]
        taken = [self._turn(CANDIDATE, benchmark, seed) for seed in each][1:]
        if not benchmark.factory:
            ask("hold", benchmark.name, each[-1], 0, True, timeout=READY)
        layouts = self.layouts(benchmark)
        ask("end", benchmark.name)
        metrics = benchmark.slowdowns
        return {m: median(seconds[m] for seconds in taken) for m in metrics}, counted, layouts

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Pin both sides to one processor for their turns."""
        if self.processor is None:
            yield
            return
        self.each("pin", self.processor)
        try:
            yield
        finally:
            if not self.failed:
                self.each("pin", None)

    def _turns(self, benchmark: Benchmark, pairs: int, paces: Mapping[str, float]) -> Taken:
        found: dict[str, list[dict[str, float]]] = {BASE: [], CANDIDATE: []}
        worked, passed = dict.fromkeys(found, 0.0), dict.fromkeys(found, 0.0)  # while one waits

        def seconds_of(side: str) -> float:
            try:
                return self.workers[side].worked()
            except WorkerError as error:
                self.failed = True
                raise SideError(side, error) from error

        first, seeds = turns.new_seed(), list[int]()
        for name in reversed(self.order):  # a process's first turn is colder and does not count
            self._turn(name, benchmark, first)
        began = time.monotonic()
        for index in range(pairs):
            if index >= FEWEST and index % 2 == 0 and time.monotonic() - began > LONGEST:
                break
            seeds.append(turns.new_seed())
            order = self.order[:: 1 if index % 2 == 0 else -1]
            for name, idle in zip(order, reversed(order), strict=True):
                start, before = time.monotonic(), seconds_of(idle)
                took = self._turn(name, benchmark, seeds[-1], paces.get(name, 0.0))
                found[name].append(took)
                worked[idle] += seconds_of(idle) - before
                passed[idle] += time.monotonic() - start
        turns.check_idle(worked, passed)
        return Taken(seeds, found)

    def _turn(
        self, name: str, benchmark: Benchmark, seed: int, pace: float = 0.0
    ) -> dict[str, float]:
        """The seconds of a turn of one side, and perhaps the means of its calls. seed: of its
        values. Raises ValueError for anything else."""
        seconds: dict[str, float] = self.ask(name, "turn", benchmark.name, seed)
        turns.check_times(seconds, name, benchmark.slowdowns, pace)
        return seconds

    @property
    def order(self) -> list[str]:
        """The sides, the leading one first."""
        return sorted(self.workers, key=lambda name: name != self.leading)

    def pids(self) -> list[int]:
        return [worker.pid for worker in self.workers.values()]

    def discard(self) -> None:
        """End an unused pair without waiting for its imports."""
        for worker in self.workers.values():
            worker.kill()
        self.close()

    def close(self) -> None:
        close_all(self.workers.values())


def make_side(
    worker: Worker, device: torch.device, registered: Registered, **more: Mapping[str, float] | str
) -> None:
    """Make a worker's `Side`, under the key ``side``; more: its further arguments."""
    worker.make(
        "side",
        FACTORY,
        timeout=READY,
        device=str(device),
        package=registered.package,
        more=registered.factory,
        own=registered.own,
        **more,
    )


_MODULE = FACTORY.partition(":")[0]
_IMPORTED_LATE = ("torch.fx.experimental.symbolic_shapes",)  # by the first backward pass: a second
