"""Memory of a training run: what stays allocated between steps, and a step's peak."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from tinyllama.harness.measure.memory import (
    forget_peak,
    live_bytes,
    peak_bytes,
    resident_peak_bytes,
)
from tinyllama.training.step import TrainStep


@dataclass(frozen=True)
class Memory:
    """Bytes, and what was counted: torch does not count what it allocates on a CPU."""

    live_bytes: int
    live_means: str
    peak_bytes: int
    peak_means: str


class MemoryMeter:
    """Reads the memory of a step's device; `start` comes before `TrainStep.prepare`.

    A replay of a captured step allocates from the graph's own pool, which the allocator counts
    during the capture only. The peak therefore covers the preparation, which runs the same steps.
    """

    def __init__(self, step: TrainStep) -> None:
        self._step = step
        self._gpu = step.device.type != "cpu"
        self._peak = 0

    def start(self) -> None:
        """Forget the peak so far."""
        forget_peak(self._step.device)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude what happens in this context from the peak. (Only on a GPU: the peak of a process
        cannot be paused.)"""
        self._peak = self._read_peak()
        try:
            yield
        finally:
            self.start()

    def live(self) -> int:
        """Bytes that stay allocated between steps."""
        if self._gpu:
            return live_bytes(self._step.device, self._step.graphs)
        parameters = self._step.optimizer.parameters
        gradients = [p.grad for p in parameters if p.grad is not None]
        tensors = [*parameters, *gradients, *self._step.optimizer.tensors().values()]
        return sum(tensor.nbytes for tensor in tensors)

    def read(self) -> Memory:
        if self._gpu:
            means = ("taken on the device", "taken on the device")
        else:
            freed = self._step.plan.memory == "small"
            what = "parameters and" if freed else "parameters, gradients and"
            means = (f"{what} optimizer state", "resident set of the process")
        return Memory(self.live(), means[0], self._read_peak(), means[1])

    def _read_peak(self) -> int:
        if self._gpu:
            return max(self._peak, peak_bytes(self._step.device, self._step.graphs))
        return resident_peak_bytes()
