"""Two workers, one of each side, on one device: a block is one fresh launch of both.

Within a block the sides alternate A B B A: each comes first as often as second, and a drift slows
both alike. Compiled code is kept for each side from block to block; processes are not.

Both sides are pinned to one processor, since they never work at the same time. With a processor
each, host time differs between them by the other work of those processors (docs/LOG.md, "One
processor for both sides").
"""

from __future__ import annotations

import math
import os
import random
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import log
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tinyllama.harness.gate.decision import of_block
from tinyllama.harness.gate.registered import Registered
from tinyllama.harness.gate.side import Benchmark
from tinyllama.harness.gate.sources import roots
from tinyllama.harness.gate.subject import HOST
from tinyllama.harness.gate.watch import identity
from tinyllama.harness.machine.worker import Worker, WorkerError, close_all
from tinyllama.harness.measure.op_contender import WrongResultError
from tinyllama.harness.records.entries import Ratio
from tinyllama.harness.records.results import is_number

FACTORY = "tinyllama.harness.gate.side:Side"
BASE, CANDIDATE = "base", "candidate"
WARM_UP = 0.02  # seconds of repeating before a benchmark is timed, on a device that is warm
FEWEST, LONGEST = 8, 2.0  # pairs of a block at least; seconds after which these are enough
READY = 600.0  # seconds for a benchmark to be compiled
TURN = 60.0  # seconds for anything else
# A side's clock and that of this process: calls in a row, and how much a turn may be below these.
PACES, PACED = 6, 0.2  # readings at most; seconds of calls that are enough
CLOCK_RATIO, CLOCK_SECONDS = 1.25, 0.05  # of what it says; for asking it
TURN_RATIO = 4.0  # the fastest call of a turn, and the mean of calls in a row


@dataclass(frozen=True)
class Tree:
    """A side before it runs.

    label: the user's name for it. caches: the folder of its compiled code. slowed, usual: see
    `Side`.
    """

    name: str
    root: Path
    python: str
    label: str
    caches: Path
    slowed: Mapping[str, float] = field(default_factory=dict)
    usual: Mapping[str, float] = field(default_factory=dict)


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
    def on(device: torch.device) -> Effort:
        if device.type == "cpu":
            return Effort(pairs=20, repeated=20, first=0.3)
        return Effort(pairs=10, repeated=20, first=0.5)

    def of(self, benchmark: Benchmark) -> int:
        """The pairs of a benchmark."""
        return self.repeated if HOST in benchmark.slowdowns else self.pairs


class SideError(RuntimeError):
    """What went wrong on one side with one benchmark."""

    def __init__(self, side: str, error: WorkerError) -> None:
        super().__init__(f"{side}: {error}")
        self.side = side
        self.wrong = error.raised(WrongResultError)
        self.details = error.details


class Pair:
    """The workers of both sides. `ask` asks one of them, `each` both at once.

    processor: both are pinned to it in their turns, unless it is None. leading: the side that is
    asked first, which the session alternates. paces: by benchmark and side, what `pace` said.
    preload: further modules that the workers import before they are asked.
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
        self.failed = False
        self.processor: int | None = None
        self.paces: Mapping[str, Mapping[str, float]] = {}
        self.leading = BASE
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
        caches = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
        env = {name: str(tree.caches / name.lower()) for name in caches}
        env |= {"PYTHONHASHSEED": str(self.hash_seed), "PYTHONDONTWRITEBYTECODE": "1"}
        env |= _ALLOCATOR
        if self.device.type == "cpu":
            env["OMP_NUM_THREADS"] = "1"  # idle threads spin, which slows the other side
        if self.registered.own is not None:
            given = filter(None, [os.environ.get("PYTHONPATH")])
            env["PYTHONPATH"] = os.pathsep.join([*map(str, roots(tree.root)), *given])
        modules = (_MODULE, self.registered.package, *_IMPORTED_LATE, *self.preload)
        return Worker(tree.name, python=tree.python, cwd=tree.root, preload=modules, env=env)

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
            make_side(
                self.workers[name],
                self.device,
                self.registered,
                slowed=dict(tree.slowed),
                usual=dict(tree.usual),
            )

        self._both(make)

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

    def statistics(
        self, benchmark: Benchmark, proofs: Mapping[str, Any], pairs: int, warm_up: float
    ) -> dict[str, float]:
        """A block's statistic of each metric; see `tinyllama.harness.gate.decision.of_block`.

        pairs: an even number. Raises SideError, or ValueError where a side does not give a time of
        every metric.
        """
        self.begin(benchmark)

        def expect(side: str) -> None:
            self.ask(side, "expect", benchmark.name, proofs[side], warm_up, timeout=READY)

        self._both(expect)
        with self._held():
            logs = self._turns(benchmark, pairs)
        self.end(benchmark)
        return {metric: float(of_block(values)) for metric, values in logs.items()}

    def pace(self, name: str, benchmark: Benchmark) -> float:
        """Seconds of a call of a side, by the clock of this process: at most that.

        Raises ValueError for a side whose own clock says much less.
        """
        calls, fastest = 8, math.inf
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
            if took >= PACED:
                break
            calls *= 4
        return fastest

    def layouts(self, benchmark: Benchmark) -> dict[str, Ratio]:
        """How many times as long the candidate's calls take in the benchmark's layouts as on
        contiguous inputs; their results must be expected. Raises SideError."""
        if not benchmark.layouts:
            return {}
        asked = (benchmark.name, tuple(benchmark.layouts))
        found: dict[str, Ratio] = self.ask(CANDIDATE, "layouts", *asked, timeout=READY)
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
        taken = [self._turn(CANDIDATE, benchmark) for _ in range(1 + effort.of(benchmark))][1:]
        layouts = self.layouts(benchmark)
        ask("end", benchmark.name)
        metrics = benchmark.slowdowns
        return {m: median(seconds[m] for seconds in taken) for m in metrics}, counted, layouts

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Pin both sides to one processor for their turns; preparation needs several."""
        if self.processor is None:
            yield
            return
        self.each("pin", self.processor)
        try:
            yield
        finally:
            if not self.failed:
                self.each("pin", None)

    def _turns(self, benchmark: Benchmark, pairs: int) -> dict[str, list[float]]:
        logs: dict[str, list[float]] = {metric: [] for metric in benchmark.slowdowns}
        paces = self.paces.get(benchmark.name, {})
        for name in reversed(self.order):  # a process's first turn is colder and does not count
            self._turn(name, benchmark)
        began = time.monotonic()
        for index in range(pairs):
            if index >= FEWEST and index % 2 == 0 and time.monotonic() - began > LONGEST:
                break
            order = self.order[:: 1 if index % 2 == 0 else -1]
            took = {name: self._turn(name, benchmark) for name in order}
            for name, pace in paces.items():
                if max(took[name].values()) * TURN_RATIO < pace:
                    raise ValueError(
                        f"a turn of the {name} says {max(took[name].values()):.3g} s for a call, "
                        f"which took {pace:.3g} s by the judge's clock: its clock is wrong"
                    )
            for metric, ratios in logs.items():
                ratios.append(log(took[CANDIDATE][metric] / took[BASE][metric]))
        return logs

    def _turn(self, name: str, benchmark: Benchmark) -> dict[str, float]:
        """The seconds of a turn of one side. Raises ValueError for anything else."""
        seconds: dict[str, float] = self.ask(name, "turn", benchmark.name)
        if seconds.keys() != benchmark.slowdowns.keys():
            given = ", ".join(seconds) or "nothing"
            wanted = ", ".join(benchmark.slowdowns)
            raise ValueError(f"a turn of the {name} gave {given}, not {wanted}")
        for metric, value in seconds.items():
            if not (is_number(value) and value > 0):
                raise ValueError(f"{metric}: {value!r} s in a turn of the {name} is no time")
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
    worker: Worker, device: torch.device, registered: Registered, **more: Mapping[str, float]
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


# glibc keeps freed memory: how much it returned differed between processes (docs/LOG.md).
_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(2**25),  # the largest that it takes
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_TOP_PAD_": str(2**26),
}
_MODULE = FACTORY.partition(":")[0]
_IMPORTED_LATE = ("torch.fx.experimental.symbolic_shapes",)  # by the first backward pass: a second


@contextmanager
def opened(trees: Sequence[Tree], device: torch.device, registered: Registered) -> Iterator[Pair]:
    """A fresh pair, ready to be asked, for a `with` statement. Raises SideError."""
    pair = Pair(trees, device, registered)
    try:
        pair.open()
        yield pair
    finally:
        pair.close()


class PairPool:
    """`opened`, for machines with spare processors: the next pairs start while one is used.

    Until they are asked they only import, without touching a device, on other processors than the
    timed one. The last pair ends while the next one begins. pairs: how many start ahead; importing
    takes longer than a block of one benchmark.
    """

    PRELOAD = ("torch._dynamo",)  # an optimizer imports it: 1.5 s of the 3.3 s of a step

    def __init__(self, timed: int, pairs: int) -> None:
        self.pairs = pairs
        self._timed = timed
        self._next: deque[Pair] = deque()
        self._pool = ThreadPoolExecutor(1)
        self._ending: Future[None] | None = None

    @contextmanager
    def __call__(
        self, trees: Sequence[Tree], device: torch.device, registered: Registered
    ) -> Iterator[Pair]:
        pair = self._next.popleft() if self._next else Pair(trees, device, registered)
        try:
            pair.open()
            with _without(self._timed):
                while len(self._next) < self.pairs:
                    self._next.append(Pair(trees, device, registered, self.PRELOAD))
            yield pair
        finally:
            self._wait()
            self._ending = self._pool.submit(pair.close)

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


def timing_processor(device: torch.device) -> int:
    """The processor that both sides are pinned to. It is not the first, which does the system's own
    work, and mostly differs between GPUs, each of which may have a gate at work."""
    first, *others = sorted(os.sched_getaffinity(0))
    return others[zlib.crc32(identity(device).encode()) % len(others)] if others else first


@contextmanager
def _without(processor: int) -> Iterator[None]:
    """Keep processes that start meanwhile off a processor."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before - {processor})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


PROCESSORS = 8  # from so many on, importing on half of them disturbs no turn
MOST = 4  # pairs ahead; six make blocks no faster (docs/LOG.md)


@contextmanager
def launcher(timed: int) -> Iterator[Callable[..., AbstractContextManager[Pair]]]:
    """A function that opens pairs on this machine. timed: both sides are pinned to it."""
    processors = len(os.sched_getaffinity(0))
    if processors < PROCESSORS:
        yield opened
        return
    ahead = PairPool(timed, min(MOST, processors // 4))
    try:
        yield ahead
    finally:
        ahead.close()
