"""Memory of a training run: what stays between steps, and the most that a step needs."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tinyllama.step import TrainStep


@dataclass(frozen=True)
class Memory:
    """Bytes, and what they are bytes of: a CPU has no allocator to ask."""

    live_bytes: int
    live_means: str
    peak_bytes: int
    peak_means: str


class MemoryMeter:
    """Reads the memory of a step's device; `start` comes before `TrainStep.prepare`.

    What a replay of a captured step allocates lies in the graph's own pool, and the allocator
    sees it during the capture only. The peak therefore covers the preparation, which runs the
    same steps.
    """

    def __init__(self, step: TrainStep) -> None:
        self._step = step
        self._gpu = step.device.type != "cpu"
        self._peak = 0

    def start(self) -> None:
        """Forget the peak so far."""
        if self._gpu:
            torch.cuda.reset_peak_memory_stats(self._step.device)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out of the peak what happens meanwhile (a process's cannot be paused)."""
        self._peak = self._read_peak()
        try:
            yield
        finally:
            self.start()

    def live(self) -> int:
        """Bytes that stay between steps."""
        if self._gpu:
            return torch.cuda.memory_allocated(self._step.device)
        parameters = list(self._step.model.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        tensors = [*parameters, *gradients, *self._step.optimizer.tensors().values()]
        return sum(tensor.nbytes for tensor in tensors)

    def read(self) -> Memory:
        if self._gpu:
            means = ("allocated on the device", "allocated on the device")
        else:
            means = ("parameters, gradients and optimizer state", "resident set of the process")
        return Memory(self.live(), means[0], self._read_peak(), means[1])

    def _read_peak(self) -> int:
        if self._gpu:
            return max(self._peak, torch.cuda.max_memory_allocated(self._step.device))
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
