"""The gain of each part of V2: its step with that part switched off, timed alternately with V2."""

import torch

from tinyllama.bench.measure import Contender, Measured
from tinyllama.bench.workloads import Group
from tinyllama.harness.measure.rounds import summary
from tinyllama.harness.records.entries import PartEntry
from tinyllama.model.tiers import V2

FACTORY = "tinyllama.bench.steps:TierStep"
PARTS = (
    Contender(V2.name, V2.title, "tier", FACTORY, {"tier": V2.name}),
    *(
        Contender(f"without {part}", "", "tier", FACTORY, {"tier": V2.name, "without": [part]})
        for part in ("capture", "compile", *V2.switches)
    ),
)
PREFIX = "parts-"
GROUPS = [f"{PREFIX}small-{precision}" for precision in ("fp32", "tf32", "bf16")]


def groups(device: torch.device) -> list[str]:
    """The groups of a device."""
    return GROUPS if device.type != "cpu" else []


def group_of(name: str) -> Group:
    """The workload and precision of one of `GROUPS`."""
    return Group.parse(name.removeprefix(PREFIX))


def entries_of(measured: Measured) -> list[PartEntry]:
    """An entry of each contender that ran."""
    return [
        PartEntry(
            name=f"parts/{measured.group}/{name}",
            workload=measured.group.workload,
            precision=measured.group.precision,
            contender=name,
            **summary("seconds", seconds),
            rounds=len(seconds),
            baseline=None if name == V2.name else V2.name,
            over_baseline=None if name == V2.name else measured.over(name, V2.name),
        )
        for name, seconds in measured.seconds.items()
    ]
