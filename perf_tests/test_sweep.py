"""Time and memory against sequence length and against batch size, tier by tier."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tinyllama.bench.measure import CONTENDERS, Effort
from tinyllama.bench.workloads import Group, not_here
from tinyllama.harness.machine.worker import Worker, WorkerError
from tinyllama.harness.measure.rounds import interleaved, summary


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


@pytest.fixture(scope="module", params=SWEEPS, ids=str)
def group(
    request: pytest.FixtureRequest, recording: Any, device: torch.device
) -> Iterator[dict[str, dict[str, Any]]]:
    """Measure a sweep: entries by name."""
    sweep: Sweep = request.param
    reason = not_here(sweep.base, device)
    if reason:
        pytest.skip(reason)
    with recording.group(str(sweep)) as record:
        found: dict[str, dict[str, Any]] = {}
        for axis, batch_size, seq_len in sweep.points():
            found |= _point(sweep, axis, batch_size, seq_len, device)
        for name, entry in found.items():
            record.add(name, "sweep", **entry)
        yield found


def _point(
    sweep: Sweep, axis: str, batch_size: int, seq_len: int, device: torch.device
) -> dict[str, dict[str, Any]]:
    """Every tier at one size, by turns; a tier that does not fit says so."""
    effort = Effort.on(device)
    entries: dict[str, dict[str, Any]] = {}
    able = [tier for tier in TIERS if tier.cannot(device, str(sweep.base)) is None]
    workers = {tier.name: Worker(tier.name, preload=["tinyllama.bench.steps"]) for tier in able}
    try:
        where: dict[str, Any] = {"group": str(sweep.base), "device": str(device)}
        size: dict[str, Any] = {"batch_size": batch_size, "seq_len": seq_len}
        calls: dict[str, int] = {}
        for tier in TIERS:
            entry = {"contender": tier.name, "role": tier.role, **size, "axis": axis}
            entries[tier.name] = {**entry, **vars(sweep.base)}
            if tier not in able:
                entries[tier.name]["cannot"] = tier.cannot(device, str(sweep.base))
                continue
            try:
                worker = workers[tier.name]
                worker.make("step", tier.factory, **tier.arguments, **where, **size)
                entries[tier.name] |= worker.call("step", "memory")
                worker.call("step", "verify")
                step = worker.call("step", "warm_up", effort.warm_up / 2)
                calls[tier.name] = max(1, round(effort.turn / step))
            except WorkerError as error:
                entries[tier.name]["cannot"] = str(error)
        turns = {n: lambda n=n: workers[n].call("step", "turn", calls[n]) for n in calls}
        for name, seconds in interleaved(turns, effort.rounds // 2).items():
            entries[name] |= {**summary("seconds", seconds), "rounds": len(seconds)}
            entries[name]["samples_per_second"] = batch_size / entries[name]["seconds"]
    finally:
        for worker in workers.values():
            worker.hang_up()
        for worker in workers.values():
            worker.close()
    at = f"B{batch_size}T{seq_len}"
    return {f"sweep/{sweep.base}/{name}/{at}/{axis}": entry for name, entry in entries.items()}


def test_every_tier_runs_at_the_workloads_own_size(
    group: dict[str, dict[str, Any]], device: torch.device
) -> None:
    """A size may be too large for a tier, which its entry says; the smallest is not."""
    able = {tier.name for tier in TIERS if tier.cannot(device, "") is None}
    for entry in list(group.values())[: len(TIERS)]:
        assert "seconds" in entry or entry["contender"] not in able, entry["cannot"]
