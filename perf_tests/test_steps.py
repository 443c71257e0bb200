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
    Measured,
    Run,
    bars,
    entry_of,
    measure,
    prepared,
)
from tinyllama.bench.table import Table, may_stay_empty
from tinyllama.bench.targets import TARGETS
from tinyllama.bench.workloads import ALL, SHORT_STEPS, Group, not_here, whole
from tinyllama.harness.machine.device import device_name
from tinyllama.harness.measure.ceilings import CLEARANCE
from tinyllama.harness.plugins.recording import NotMeasured
from tinyllama.harness.records.entries import StepEntry


@dataclass
class Found:
    """A group that was measured: the series, and the entries by contender."""

    measured: Measured
    entries: dict[str, StepEntry]


@pytest.fixture(scope="module")
def short_set(
    request: pytest.FixtureRequest, recording: Any, device: torch.device
) -> Iterator[dict[str, Run]]:
    """The groups of the short set that are asked for; the contenders of all are made together."""
    selected = {recording.group_of.get(item.nodeid) for item in request.session.items}
    names = [name for name in SHORT_STEPS if name in selected]
    with prepared([Group.parse(whole(name)) for name in names], device, short=True) as runs:
        yield dict(zip(names, runs, strict=True))


@pytest.fixture(scope="module", params=[*map(str, ALL), *SHORT_STEPS])
def group(
    request: pytest.FixtureRequest, recording: Any, ceilings: Ceilings, device: torch.device
) -> Iterator[Found]:
    """Measure a group, every contender in a process of its own."""
    name = whole(request.param)
    this, short = Group.parse(name), name != request.param
    reason = not_here(this, device)
    if reason:
        pytest.skip(reason)
    with recording.group(request.param) as record:
        if short:
            measured = request.getfixturevalue("short_set")[request.param].measure()
        else:
            measured = measure(this, device)
        product = ceilings.product(this.precision)
        entries = {c.name: entry_of(c, measured, product) for c in CONTENDERS}
        record.add(*entries.values(), *ceilings.entries())
        yield Found(measured, entries)


@may_stay_empty
@pytest.mark.parametrize("contender", CONTENDERS, ids=lambda contender: contender.name)
def test_step(group: Found, contender: Contender, table: Table) -> None:
    """One training step: forward, loss, backward, AdamW. A peer may fail, and says why."""
    failed = group.measured.failed.get(contender.name)
    if failed is not None and contender.role != "peer":
        pytest.fail(f"{failed}\n{failed.details}")
    readings = group.measured.seconds.get(contender.name)
    if readings is None:
        reason = group.measured.cannot.get(contender.name, failed)
        assert reason, f"{contender.name} was not measured, and nothing says why"
        raise NotMeasured(f"{contender.name}: {reason}")
    entry = group.entries[contender.name]
    table.enter(readings, str(group.measured.group), plan=entry.plan)


def test_no_step_is_faster_than_its_arithmetic(group: Found) -> None:
    """The operations of a step, at the measured rate of large products, take longer than 0."""
    for name, entry in group.entries.items():
        if entry.mfu is not None:
            assert 0 < entry.mfu <= CLEARANCE, f"{name} runs at {entry.mfu:.2f} of the ceiling"


@pytest.mark.target
def test_targets(group: Found, recording: Any, device: torch.device) -> None:
    """The bars of targets.toml that are about this device."""
    recording.hold(bars(TARGETS, group.measured, group.entries, device_name(device)))
