"""The longest sequence that one card trains on: V3 has more tokens than torch.compile, as fast."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tinyllama.bench.ceilings import Ceilings
from tinyllama.bench.longest import BASE, COMPILED, GROUP, SELECTIVE, measure
from tinyllama.bench.workloads import not_here
from tinyllama.harness.records.entries import LongestEntry

LONGER, SPEED = 1.5, 0.95  # the bars: lengths, and speeds at each one's longest


@pytest.fixture(scope="module", params=[GROUP])
def group(
    recording: Any, ceilings: Ceilings, device: torch.device
) -> Iterator[dict[str, LongestEntry]]:
    """An entry by contender."""
    if reason := not_here(BASE, device):
        pytest.skip(reason)
    with recording.group(GROUP) as record:
        entries = measure(device, ceilings)
        record.add(*entries.values())
        yield entries


def test_every_contender_runs(group: dict[str, LongestEntry]) -> None:
    """A peer that is not installed says so; what is ours must run."""
    for name, entry in group.items():
        assert entry.ran or entry.role == "peer", f"{name}: {entry.cannot}"


@pytest.mark.target
def test_longer_sequences_fit_at_no_loss_of_speed(group: dict[str, LongestEntry]) -> None:
    compiled, ours = group[COMPILED.name], group[SELECTIVE.name]
    if not compiled.ran:
        pytest.skip(f"nothing to compare with: {compiled.cannot}")
    longer = (ours.seq_len or 0) / (compiled.seq_len or 1)
    assert longer >= LONGER, f"{ours.seq_len} tokens are {longer:.2f} times {COMPILED.title}'s"
    speed = (ours.flops_per_second or 0) / (compiled.flops_per_second or 1)
    assert speed >= SPEED, f"there it has {speed:.2f} of the speed of {COMPILED.title}"
