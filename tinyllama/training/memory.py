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
            live, peak = (read(step.device, step.graphs) for read in (live_bytes, peak_bytes))
            return cls(live, "taken on the device", peak, "taken on the device")
        parameters = step.optimizer.parameters
        gradients = [p.grad for p in parameters if p.grad is not None]
        live = sum(t.nbytes for t in (*parameters, *gradients, *step.optimizer.tensors().values()))
        what = f"parameters{', gradients' if gradients else ''} and optimizer state"
        return cls(live, what, resident_peak_bytes(), "resident set of the process")
