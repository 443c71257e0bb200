"""Time and memory against sequence length and against batch size, tier by tier."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tinyllama.bench.sweeps import SWEEPS, TIERS, Sweep, measure
from tinyllama.bench.workloads import not_here
from tinyllama.harness.records.entries import SweepEntry


@pytest.fixture(scope="module", params=SWEEPS, ids=str)
def group(
    request: pytest.FixtureRequest, recording: Any, device: torch.device
) -> Iterator[list[SweepEntry]]:
    """Measure a sweep."""
    sweep: Sweep = request.param
    reason = not_here(sweep.base, device)
    if reason:
        pytest.skip(reason)
    with recording.group(str(sweep)) as record:
        entries = measure(sweep, device)
        record.add(*entries)
        yield entries


def test_every_tier_runs_at_the_workloads_own_size(
    group: list[SweepEntry], device: torch.device
) -> None:
    """A size may be too large for a tier, which its entry says; the smallest is not."""
    able = {tier.name for tier in TIERS if tier.cannot(device, "") is None}
    for entry in group[: len(TIERS)]:
        assert entry.ran or entry.contender not in able, entry.cannot
