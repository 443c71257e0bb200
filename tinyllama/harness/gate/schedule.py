"""Which pairs of processes are open, and where they run; the next ones are started ahead."""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import torch

from tinyllama.harness.gate.device_guard import identity
from tinyllama.harness.gate.pair import AT_ONCE, Pair, Tree
from tinyllama.harness.machine.worker import close_all

PROCESSORS = 8  # from so many on, importing on most of them disturbs no turn
AHEAD = 4  # pairs; six make blocks no faster
MEMORY = 16 * 2**30  # bytes of a GPU for each pair at work
PRELOAD = ("torch._dynamo",)  # an optimizer imports it: 1.5 s of the 3.3 s of a step


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
    first, *processors = sorted(os.sched_getaffinity(0))
    return (
        processors[zlib.crc32(identity(device).encode()) % len(processors)] if processors else first
    )


class PairPool:
    """Opens fresh pairs of processes. On machines with spare processors the next pairs start while
    some are used, and the last ones end while the next ones begin.

    Until they are asked they only import, without touching a device, on other processors than the
    timed one. ahead: how many pairs start ahead; importing takes longer than a block of one
    benchmark.
    """

    def __init__(self, timed: int, ahead: int | None = None) -> None:
        processors = len(os.sched_getaffinity(0))
        spare = min(AHEAD, processors // 3) if processors >= PROCESSORS else 0
        self.ahead = spare if ahead is None else ahead
        self._timed = timed
        self._next: deque[Pair] = deque()
        self._pool = ThreadPoolExecutor(1)
        self._ending: Future[None] | None = None

    def __enter__(self) -> PairPool:
        return self

    @contextmanager
    def pairs(
        self, trees: Sequence[Tree], device: torch.device, count: int = 1
    ) -> Iterator[list[Pair]]:
        """Fresh pairs, ready to be asked, for a `with` statement. Raises SideError."""
        pairs = [self._next.popleft() if self._next else Pair(trees, device) for _ in range(count)]
        try:
            with _without(self._timed) if self.ahead else nullcontext():
                while len(self._next) < self.ahead:  # they import while these are opened
                    self._next.append(Pair(trees, device, PRELOAD))
            open_all(pairs)
            yield pairs
        finally:
            self._wait()
            self._ending = self._pool.submit(close_pairs, pairs)
            if not self.ahead:
                self._wait()

    def _wait(self) -> None:
        ending, self._ending = self._ending, None
        if ending is not None:
            ending.result()

    def __exit__(self, *_: object) -> None:
        """End all processes."""
        try:
            self._wait()
        finally:
            for pair in self._next:
                pair.discard()
            self._pool.shutdown()


def open_all(pairs: Sequence[Pair]) -> None:
    """Open several pairs at once. Raises the SideError of the first that cannot be opened."""
    with ThreadPoolExecutor(len(pairs)) as pool:
        list(pool.map(lambda pair: pair.open(), pairs))


def close_pairs(pairs: Sequence[Pair]) -> None:
    close_all([worker for pair in pairs for worker in pair.workers.values()])


@contextmanager
def _without(processor: int) -> Iterator[None]:
    """Keep processes that start meanwhile off a processor."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before - {processor})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
