"""How much of the time that GPUs spend in collectives lies under computation."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from tinyllama.harness.measure.launches import covered

# RCCL has kept NCCL's names of kernels. Between GPUs copy engines copy, and barriers wait.
COLLECTIVE = re.compile(r"nccl|rccl|memcpy ptop|symmetric_memory", re.IGNORECASE)


@dataclass(frozen=True)
class Overlap:
    """Seconds of a call in which a collective's kernel ran, or a copy between GPUs, the wait for
    other ranks included, and of these the seconds in which another kernel ran too."""

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
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True
    ) as profiler:
        call()
        torch.cuda.synchronize(device)
    on_host = torch.autograd.DeviceType.CPU
    kernels = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type != on_host and not event.is_user_annotation
    ]
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    return overlap_of(kernels)


def overlap_of(kernels: Iterable[tuple[str, float, float]]) -> Overlap:
    """From the name, start and end of each kernel, in microseconds."""
    named = [(bool(COLLECTIVE.search(name)), (start, end)) for name, start, end in kernels]
    collectives = [span for collective, span in named if collective]
    others = [span for collective, span in named if not collective]
    both = covered(collectives) + covered(others) - covered([*collectives, *others])
    return Overlap(covered(collectives) * 1e-6, both * 1e-6)
