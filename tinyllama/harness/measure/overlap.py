"""How much of the time that GPUs spend in collectives lies under computation."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import profile

from tinyllama.harness.measure.launches import activities, covered, on_device

COLLECTIVE = re.compile(r"nccl|rccl", re.IGNORECASE)  # RCCL has kept NCCL's names of kernels


@dataclass(frozen=True)
class Overlap:
    """Seconds of a call in which a collective's kernel ran, the wait for other ranks included, and
    of these the seconds in which another kernel ran too."""

    collective: float
    hidden: float

    @property
    def share(self) -> float | None:
        """The hidden share; None where no collective ran."""
        return self.hidden / self.collective if self.collective else None


def overlap(call: Callable[[], object], device: torch.device, trace: Path | None = None) -> Overlap:
    """Profile one call on a GPU, which must have run before; all ranks call this together.

    trace: where the timeline is written, for Perfetto or chrome://tracing.
    """
    torch.cuda.synchronize(device)
    with profile(activities=activities(device), acc_events=True) as profiler:
        call()
        torch.cuda.synchronize(device)
    events = on_device(profiler.events())
    kernels = [(e.name, e.time_range.start, e.time_range.end) for e in events]
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    return overlap_of(kernels)


def overlap_of(kernels: Iterable[tuple[str, float, float]]) -> Overlap:
    """From the name, start and end of each kernel, in microseconds."""
    named = [(bool(COLLECTIVE.search(name)), (start, end)) for name, start, end in kernels]
    collectives = [span for collective, span in named if collective]
    computations = [span for collective, span in named if not collective]
    hidden = covered(collectives) + covered(computations) - covered([*collectives, *computations])
    return Overlap(covered(collectives) * 1e-6, hidden * 1e-6)
