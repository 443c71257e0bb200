"""Time and memory against sequence length and against batch size, tier by tier."""

from dataclasses import dataclass, replace

import torch

from tinyllama.bench.measure import CONTENDERS, StepGroup
from tinyllama.bench.workloads import Group, not_here
from tinyllama.harness.measure.rounds import summary
from tinyllama.harness.records.entries import SweepEntry

ROUNDS = 10  # of each size


@dataclass(frozen=True)
class Sweep:
    """A workload in a precision, and the sizes beside its own that are tried."""

    base: Group
    lengths: tuple[int, ...]
    batches: tuple[int, ...]

    def __str__(self) -> str:
        return f"sweep-{self.base}"

    def points(self) -> list[tuple[str, int, int]]:
        """Axis, batch size, sequence length; the workload's own size is among the lengths."""
        shape = self.base.shape
        along = [("seq_len", shape.batch_size, length) for length in self.lengths]
        return along + [("batch_size", batch, shape.seq_len) for batch in self.batches]


SWEEPS = (
    Sweep(Group("tiny", "fp32"), lengths=(32, 64, 128), batches=(1, 16)),
    Sweep(Group("small", "bf16"), lengths=(128, 512, 1024, 2048), batches=(1, 32, 128)),
)
TIERS = tuple(contender for contender in CONTENDERS if contender.role == "tier")


def groups(device: torch.device) -> list[str]:
    """The sweeps of a device."""
    return [str(sweep) for sweep in SWEEPS if not_here(sweep.base, device) is None]


def measure(sweep: Sweep, device: torch.device) -> list[SweepEntry]:
    """An entry of every tier at every size."""
    return [entry for point in sweep.points() for entry in _point(sweep, device, *point)]


def _point(
    sweep: Sweep, device: torch.device, axis: str, batch_size: int, seq_len: int
) -> list[SweepEntry]:
    """Every tier at one size, alternately; a tier that does not fit says so."""
    size = {"batch_size": batch_size, "seq_len": seq_len}
    with StepGroup(sweep.base, device, size=size) as measured:
        effort = measured.effort
        measured.effort = replace(effort, rounds=ROUNDS, warm_up=effort.warm_up / 2)
        measured.prepare(TIERS)
        measured.time()
    entries = []
    for tier in TIERS:
        name = f"sweep/{sweep.base}/{tier.name}/B{batch_size}T{seq_len}/{axis}"
        about = {**tier.about(sweep.base), **size, "name": name, "axis": axis}
        seconds = measured.seconds.get(tier.name)
        if seconds is None:
            reason = measured.cannot.get(tier.name) or str(measured.failed[tier.name])
            entries.append(SweepEntry(**about, cannot=reason))
            continue
        step = measured.entries[tier.name]
        figures = {**summary("seconds", seconds), "rounds": len(seconds)}
        for field in ("peak_bytes", "live_bytes", "graph_bytes"):
            figures[field] = getattr(step, field)
        rate = batch_size / figures["seconds"]
        entries.append(SweepEntry(**about, **figures, samples_per_second=rate))
    return entries
