"""Time and memory against sequence length and against batch size, tier by tier."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tinyllama.bench.measure import CONTENDERS, Effort
from tinyllama.bench.workloads import Group, not_here
from tinyllama.harness.machine.worker import WorkerError, workers
from tinyllama.harness.measure.rounds import interleaved, summary
from tinyllama.harness.records.entries import SweepEntry

ROUNDS = 10  # of each point


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
    return [
        entry
        for axis, batch_size, seq_len in sweep.points()
        for entry in _point(sweep, axis, batch_size, seq_len, device)
    ]


def _point(
    sweep: Sweep, axis: str, batch_size: int, seq_len: int, device: torch.device
) -> Sequence[SweepEntry]:
    """Every tier at one size, alternately; a tier that does not fit says so."""
    effort = Effort.on(device)
    where: dict[str, Any] = {"group": str(sweep.base), "device": str(device)}
    size = {"batch_size": batch_size, "seq_len": seq_len}
    entries: dict[str, SweepEntry] = {}
    calls: dict[str, int] = {}
    with workers() as started:
        for tier in TIERS:
            if tier.cannot(device, str(sweep.base)) is None:
                started[tier.name] = tier.worker()
        for tier in TIERS:
            entry = SweepEntry(
                name=f"sweep/{sweep.base}/{tier.name}/B{batch_size}T{seq_len}/{axis}",
                **tier.about(sweep.base),
                batch_size=batch_size,
                seq_len=seq_len,
                axis=axis,
                cannot=tier.cannot(device, str(sweep.base)),
            )
            entries[tier.name] = entry
            if entry.cannot:
                continue
            try:
                worker = started[tier.name]
                worker.make("step", tier.factory, **tier.arguments, **where, **size)
                entries[tier.name] = replace(entry, **worker.call("step", "memory"))
                worker.call("step", "verify")
                step = worker.call("step", "warm_up", effort.warm_up / 2)
                calls[tier.name] = max(1, round(effort.turn / step))
            except WorkerError as error:
                started[tier.name].close()  # the others need the memory that it holds
                entries[tier.name] = replace(entries[tier.name], cannot=str(error))
        turns = {n: lambda n=n: started[n].call("step", "turn", calls[n]) for n in calls}
        for name, seconds in interleaved(turns, ROUNDS).items():
            entry = replace(entries[name], **summary("seconds", seconds), rounds=len(seconds))
            entries[name] = replace(entry, samples_per_second=batch_size / entry.time)
    return list(entries.values())
