"""How much of a device's memory benchmarks need, and which may hold theirs at the same time.

What a call must move is declared by its op (`Op.bytes`). Other needs are multiples of it, too high
rather than too low: waiting for memory costs seconds; a benchmark that finds none is measured again
alone.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition

import torch

from tinyllama.harness.gate.benchmarks import Benchmark

# On an H100, silu_mul on 16384 x 11008 bf16, which moves 2.9e9 bytes: up to 11 GiB while it is made
# ready, 22 GiB more while it is compared with float64.
READY = 4.0  # times the bytes moved: inputs of two seeds, those of timed calls, and results
LAID_OUT = 2.0  # times as much: strided inputs have gaps, and other layouts are timed, too
EXACT, SCORES = 10.0, 2**34  # the same while it is compared with float64; and bytes
MOST_EXACT = 100.0  # times at most: scores of attention are far larger than what is moved
UNKNOWN = 2**28  # bytes moved by a benchmark that says none: a training step on small
# Of the device's memory. Together they are above 1, since estimates are above what is taken.
READY_SHARE, EXACT_SHARE = 0.6, 0.5


def ready_bytes(benchmark: Benchmark) -> float:
    """Of one side that is ready to be timed."""
    return READY * (LAID_OUT if benchmark.layouts else 1.0) * (benchmark.moved or UNKNOWN)


def exact_bytes(benchmark: Benchmark) -> float:
    """Of one side while its results are compared with float64, beside `ready_bytes`."""
    moved = benchmark.moved or UNKNOWN
    return min(MOST_EXACT * moved, EXACT * moved + SCORES)


def bytes_of(device: torch.device) -> float:
    """All memory of a device, or of the host."""
    if device.type == "cpu" or not torch.cuda.is_available():
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return float(torch.cuda.get_device_properties(device).total_memory)


class Memory:
    """Bytes that several threads share. Who asks first is served first; what is larger than all of
    it has it alone."""

    def __init__(self, total: float) -> None:
        self.total = total
        self._held = 0.0
        self._waiting: deque[object] = deque()
        self._changed = Condition()

    @contextmanager
    def held(self, size: float) -> Iterator[None]:
        """Hold so many bytes in a `with` block, once they are free."""
        size, me = min(size, self.total), object()
        with self._changed:
            self._waiting.append(me)
            self._changed.wait_for(
                lambda: self._waiting[0] is me and self._held + size <= self.total
            )
            self._waiting.popleft()
            self._held += size
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._held -= size
                self._changed.notify_all()
