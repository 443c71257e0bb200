"""Weak and strong scaling of training steps over all GPUs of this machine."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tinyllama.bench.scaling import SCALINGS, Scaling, cannot, measure
from tinyllama.harness.records.entries import ScalingEntry

LOSSES = 0.01  # by which the losses of two contenders may differ in bf16


@pytest.fixture(scope="module", params=SCALINGS, ids=str)
def group(
    request: pytest.FixtureRequest, recording: Any, device: torch.device
) -> Iterator[list[ScalingEntry]]:
    """Measure every contender; all GPUs are held meanwhile."""
    scaling: Scaling = request.param
    if reason := cannot(scaling, device):
        pytest.skip(reason)
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    with recording.group(str(scaling), gpus) as record:
        entries = measure(scaling, len(gpus))
        record.add(*entries)
        yield entries


def test_every_parameter_gets_its_gradient(group: list[ScalingEntry]) -> None:
    """Compared with the reference; of shards, whose reference is too large, the losses are those
    of the other contenders."""
    shards = [entry for entry in group if entry.contender.endswith("-shards")]
    for entry in group:
        if entry not in shards:
            assert entry.parameters, f"{entry.name}: no gradient was compared"
            assert entry.gradients == entry.parameters, entry.name
    for entry in shards:
        assert entry.steps == shards[0].steps, entry.name
        assert entry.last_loss == pytest.approx(shards[0].last_loss, rel=LOSSES), entry.name
