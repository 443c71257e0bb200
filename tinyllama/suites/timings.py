"""Every provider of every op on its timed cases: device time, host time, bandwidth, roofline."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tinyllama.bench.ceilings import Ceilings
from tinyllama.bench.measure_ops import (
    DTYPES,
    PEERS,
    Bench,
    OpCaseRun,
    bounded_layouts,
    entries_of,
    groups,
    layout_bars,
    providers_of,
)
from tinyllama.bench.peers import PEER_FILES
from tinyllama.bench.table import Table, may_stay_empty, readings_clock, table
from tinyllama.bench.workloads import SHORT_OPS, full_group
from tinyllama.harness.declare.op import Op
from tinyllama.harness.measure.ceilings import CLEARANCE
from tinyllama.harness.measure.op_contender import ops_of
from tinyllama.harness.plugins.recording import NoBarApplies, NotMeasured
from tinyllama.harness.plugins.suite import worker_device
from tinyllama.harness.records.entries import OpEntry
from tinyllama.suites.selection import PACKAGE, SELECTION

__all__ = ["readings_clock", "table"]  # fixtures
Measured = tuple[dict[str, OpCaseRun], list[OpEntry]]


def timed(config: pytest.Config) -> tuple[list[Op], tuple[str, ...]]:
    """The ops that a session times, and the files that declare them or providers of them: those it
    is about, else all of this package beside what peers have for them."""
    if SELECTION in config.stash:
        selection = config.stash[SELECTION]
        return [op for op in selection.ops if op.timed], selection.files
    files, names = (*PEER_FILES, *config.option.ops), config.option.op
    registry = ops_of(PACKAGE, files).values()
    return [op for op in registry if not names or op.name in names], files


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """Not that of a repository's own conftest."""
    return worker_device(request.config)


@pytest.fixture(scope="session")
def ceilings(device: torch.device) -> Ceilings:
    return Ceilings(device)


@pytest.fixture(scope="module", params=[*(f"ops-{dtype}" for dtype in DTYPES), *SHORT_OPS])
def group(
    request: pytest.FixtureRequest, recording: Any, ceilings: Ceilings, device: torch.device
) -> Iterator[Measured]:
    """Measure every op in one dtype: the runs by case, and the entries."""
    name = full_group(request.param)
    if name not in groups(device):
        pytest.skip(f"{request.param} is timed on a GPU")
    short = name != request.param
    with recording.group(request.param) as record:
        ops = timed(request.config)
        runs = Bench(name.removeprefix("ops-"), device, *ops, short=short).measure()
        entries = [entry for run in runs.values() for entry in entries_of(run, ceilings)]
        record.add(*entries, *ceilings.entries())
        yield runs, entries


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for each provider of each timed case."""
    if metafunc.function is test_op:
        cases = [
            pytest.param(op, provider, place, id=f"{op.name}-{provider}-{case}")
            for op in timed(metafunc.config)[0]
            for place, case in enumerate(op.timed)
            for provider in providers_of(op)
        ]
        if not cases and SELECTION in metafunc.config.stash:
            names = ", ".join(op.name for op in metafunc.config.stash[SELECTION].ops)
            why = f"{names}: no timed cases: add timed=[Case(...)] to the op"
            skip = pytest.mark.skip(reason=why)
            cases = [pytest.param(None, "", 0, id="no-timed-cases", marks=skip)]
        metafunc.parametrize(("op", "provider", "place"), cases)


@may_stay_empty
def test_op(group: Measured, op: Op, provider: str, place: int, table: Table) -> None:
    """Device time of the last pass: forward and backward, where the op has one.

    A provider of ours must run and be right; a peer that does not says why in its entry.
    """
    name = f"{op.name}-{op.timed[place]}"
    run = group[0].get(name)
    if run is None:
        raise NotMeasured(f"{name} is not a case of this group on this device")
    failed = run.failed.get(provider)
    if failed is not None and provider not in PEERS:
        pytest.fail(f"{name}, {provider}: {failed}\n{failed.details}")
    if provider not in run.readings:
        reason = run.cannot.get(provider, failed)
        assert reason, f"{name}, {provider}: it was not measured, and nothing says why"
        raise NotMeasured(f"{provider}: {reason}")
    *_, last = run.readings[provider].values()
    table.enter([reading.device for reading in last], name)


def test_no_op_is_faster_than_its_bytes_and_operations(group: Measured) -> None:
    """A time below the roofline is a mistake: of the clock, of the count, or of the work done."""
    ran = [entry for entry in group[1] if entry.ran]
    assert ran, "no provider of a timed case runs here"
    for entry in ran:
        share = entry.roofline_share or 0
        assert 0 < share <= CLEARANCE, f"{entry.name} takes {entry.time} s: {share:.2f} of the roof"


@pytest.mark.target
def test_layouts(group: Measured, recording: Any) -> None:
    """The bars of ops on inputs that are not contiguous, for each provider with kernels."""
    layouts = bounded_layouts(group[0].values())
    if not layouts:
        raise NoBarApplies("no provider with a backward of its own is timed on this device")
    recording.hold(layout_bars(layouts))
