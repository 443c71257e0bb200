"""Weak and strong scaling of training steps over all GPUs of this machine."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tinyllama.bench.scaling import SCALINGS, WEAK, Scaling, cannot, measure
from tinyllama.harness.plugins.card import gpus
from tinyllama.harness.records.entries import ScalingEntry
from tinyllama.training.reduction import COPIES

LOSSES = 0.01  # by which the losses of two contenders may differ in bf16
EFFICIENT = {"medium-bf16": 0.95}  # the bar of weak scaling


@pytest.fixture(scope="module", params=SCALINGS, ids=str)
def group(
    request: pytest.FixtureRequest, recording: Any, device: torch.device
) -> Iterator[list[ScalingEntry]]:
    """Measure every contender; all GPUs are held meanwhile."""
    this: Scaling = request.param
    if reason := cannot(this, device):
        pytest.skip(reason)
    with recording.group(str(this), gpus()) as record:
        found = measure(this, len(gpus()))
        record.add(*found)
        yield found


def test_every_parameter_gets_its_gradient(group: list[ScalingEntry]) -> None:
    """Compared with the reference; of shards, whose reference is too large, the losses are those
    of the other contenders."""
    known = [entry for entry in group if entry.contender.endswith("-shards")]
    for entry in group:
        if entry not in known:
            assert entry.parameters, f"{entry.name}: no gradient was compared"
            assert entry.gradients == entry.parameters, entry.name
    for entry in known:
        assert entry.steps == known[0].steps, entry.name
        assert entry.last_loss == pytest.approx(known[0].last_loss, rel=LOSSES), entry.name


@pytest.mark.target
def test_weak_scaling(group: list[ScalingEntry]) -> None:
    """Of each tier, the way to reduce that scales best; the lower end of its interval is held to
    the bar."""
    best: dict[str, ScalingEntry] = {}
    for entry in group:
        if entry.case == WEAK and f"{entry.workload}-{entry.precision}" in EFFICIENT:
            assert entry.efficiency is not None, entry.name
            tier = entry.contender.removesuffix(f"-{COPIES}")
            best[tier] = max(best.get(tier, entry), entry, key=_efficiency)
    for entry in best.values():
        bar = EFFICIENT[f"{entry.workload}-{entry.precision}"]
        said = f"{entry.contender} has {entry.efficiency} of one GPU's speed on each"
        assert _efficiency(entry) >= bar, f"{said}, and {bar} is asked"


def _efficiency(entry: ScalingEntry) -> float:
    return 0.0 if entry.efficiency is None else entry.efficiency.low
