"""The ladder: training steps of every tier, their peers and the floor, alternately in one run."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tinyllama.bench.ceilings import Ceilings
from tinyllama.bench.measure import (
    CONTENDERS,
    Contender,
    StepGroup,
    bars,
    entry_of,
    measure,
)
from tinyllama.bench.table import Table, may_stay_empty
from tinyllama.bench.targets import TARGETS
from tinyllama.bench.workloads import ALL, SHORT_STEPS, Group, full_group, not_here
from tinyllama.harness.machine.device import device_name
from tinyllama.harness.measure.ceilings import CLEARANCE
from tinyllama.harness.plugins.recording import NotMeasured
from tinyllama.harness.records.entries import StepEntry


@dataclass
class Measured:
    """A group that was measured: the series, and the entries by contender."""

    steps: StepGroup
    entries: dict[str, StepEntry]


@pytest.fixture(scope="module", params=[*map(str, ALL), *SHORT_STEPS])
def group(
    request: pytest.FixtureRequest, recording: Any, ceilings: Ceilings, device: torch.device
) -> Iterator[Measured]:
    """Measure a group, every contender in a process of its own."""
    name = full_group(request.param)
    this, short = Group.parse(name), name != request.param
    reason = not_here(this, device)
    if reason:
        pytest.skip(reason)
    with recording.group(request.param) as record:
        steps = measure(this, device, short=short)
        product = ceilings.product(this.precision)
        entries = {c.name: entry_of(c, steps, product) for c in CONTENDERS}
        record.add(*entries.values(), *ceilings.entries())
        yield Measured(steps, entries)


@may_stay_empty
@pytest.mark.parametrize("contender", CONTENDERS, ids=lambda contender: contender.name)
def test_step(group: Measured, contender: Contender, table: Table) -> None:
    """One training step: forward, loss, backward, AdamW. A peer may fail, and says why."""
    failed = group.steps.failed.get(contender.name)
    if failed is not None and contender.role != "peer":
        pytest.fail(f"{failed}\n{failed.details}")
    readings = group.steps.seconds.get(contender.name)
    if readings is None:
        reason = group.steps.cannot.get(contender.name, failed)
        assert reason, f"{contender.name} was not measured, and nothing says why"
        raise NotMeasured(f"{contender.name}: {reason}")
    entry = group.entries[contender.name]
    table.enter(readings, str(group.steps.group), plan=entry.plan)


def test_no_step_is_faster_than_its_arithmetic(group: Measured) -> None:
    """The operations of a step, at the measured rate of large products, take longer than 0."""
    for name, entry in group.entries.items():
        if entry.mfu is not None:
            assert 0 < entry.mfu <= CLEARANCE, f"{name} runs at {entry.mfu:.2f} of the ceiling"


@pytest.mark.target
def test_targets(group: Measured, recording: Any, device: torch.device) -> None:
    """The bars of targets.toml that are about this device."""
    recording.hold(bars(TARGETS, group.steps, group.entries, device_name(device)))
