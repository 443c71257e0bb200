"""Memory of a training run: what stays allocated between steps, and the peak of all steps.

A replay of a captured step allocates from the graph's own pool, which the allocator counts during
the capture only. So the peak covers the preparation, which runs the same steps: `forget_peak` comes
before `TrainStep.prepare`.
"""

from dataclasses import dataclass

from tinyllama.harness.measure.memory import live_bytes, peak_bytes, resident_peak_bytes
from tinyllama.training.step import TrainStep


@dataclass(frozen=True)
class Memory:
    """Bytes, and what was counted: torch does not count what it allocates on a CPU."""

    live_bytes: int
    live_means: str
    peak_bytes: int
    peak_means: str

    @classmethod
    def of(cls, step: TrainStep) -> "Memory":
        if step.device.type != "cpu":
            means, peak = "taken on the device", peak_bytes(step.device, step.graphs)
            return cls(live_memory(step), means, peak, means)
        freed = step.plan.memory == "small"
        what = "parameters and" if freed else "parameters, gradients and"
        peak = resident_peak_bytes()
        return cls(
            live_memory(step), f"{what} optimizer state", peak, "resident set of the process"
        )


def live_memory(step: TrainStep) -> int:
    """Bytes that stay allocated between steps."""
    if step.device.type != "cpu":
        return live_bytes(step.device, step.graphs)
    parameters = step.optimizer.parameters
    gradients = [p.grad for p in parameters if p.grad is not None]
    tensors = [*parameters, *gradients, *step.optimizer.tensors().values()]
    return sum(tensor.nbytes for tensor in tensors)
