"""The longest sequence that one card trains on, V3 against torch.compile.

Each has the card to itself, with a batch of one. Two shorter lengths tell how its memory grows;
the longest is the largest multiple of `STEP` that then runs, for V3 not more than `ENOUGH` times
that of torch.compile: time grows with the square. Speed is model FLOPs per second,
causal attention counted half, since what a token costs grows with the length. Gradients are held
to the reference at the shortest length: at the longest, the scores of one layer of the reference
outgrow the card.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from perf_tests.conftest import Ceilings
from perf_tests.measure import CONTENDERS
from perf_tests.peers import Contender
from perf_tests.workloads import LARGE, Group, not_here
from tinyllama.harness.worker import Worker, WorkerError

BASE = Group.parse(LARGE)
GROUP = f"longest-{BASE}"
SHORTER = (4096, 16384)  # tokens
STEP = 1024  # tokens
ROOM = 0.98  # of the card's memory: the rest is what a process takes before any tensor
SHRINK = 0.96  # tried next, where a length does not fit
LONGER, SPEED = 1.5, 0.95  # the bars: lengths, and speeds at each one's longest
ENOUGH = 1.6

_V3 = next(one for one in CONTENDERS if one.name == "v3")
COMPILED = next(one for one in CONTENDERS if one.name == "hf-compile")
SELECTIVE = replace(
    _V3,
    name="v3-selective",
    title=f"{_V3.title}, selective memory",
    arguments={**_V3.arguments, "memory": "selective"},
)
Entry = dict[str, Any]


def groups(device: torch.device) -> list[str]:
    """The group of this file, where the device takes it."""
    return [] if not_here(BASE, device) else [GROUP]


@pytest.fixture(scope="module", params=[GROUP])
def group(recording: Any, ceilings: Ceilings, device: torch.device) -> Iterator[dict[str, Entry]]:
    """The longest sequence of each contender: an entry by contender."""
    if reason := not_here(BASE, device):
        pytest.skip(reason)
    with recording.group(GROUP) as record:
        compiled = _entry(COMPILED, device, ceilings)
        enough = ENOUGH * compiled.get("seq_len", math.inf)
        found = {
            COMPILED.name: compiled,
            SELECTIVE.name: _entry(SELECTIVE, device, ceilings, enough),
        }
        for name, entry in found.items():
            record.add(f"longest/{BASE}/{name}", "longest", **entry)
        yield found


def _entry(
    contender: Contender, device: torch.device, ceilings: Ceilings, enough: float = math.inf
) -> Entry:
    entry = {**vars(BASE), "contender": contender.name, "role": contender.role, "batch_size": 1}
    if reason := contender.cannot(device, str(BASE)):
        return {**entry, "cannot": reason}
    try:
        entry |= _longest(contender, device, enough)
    except WorkerError as error:
        return {**entry, "cannot": str(error)}
    flops = BASE.shape.model.step_flops(1, entry["seq_len"]) / entry["seconds"]
    return {**entry, "flops_per_second": flops, "mfu": flops / ceilings.product(BASE.precision)}


def _longest(contender: Contender, device: torch.device, enough: float) -> Entry:
    """Raises WorkerError, of the last length that was tried."""
    peaks = [_measured(contender, device, length, verify=not i) for i, length in enumerate(SHORTER)]
    (short, long), (less, more) = SHORTER, (peak["peak_bytes"] for peak in peaks)
    per_token = (more - less) / (long - short)
    _, total = torch.cuda.mem_get_info(device)
    length = int(min(enough, short + (ROOM * total - less) / per_token))
    while True:
        length = length // STEP * STEP
        try:
            return {"bytes_per_token": per_token, **_measured(contender, device, length)}
        except WorkerError:
            length = int(SHRINK * length)
            if length <= long:
                raise


def _measured(
    contender: Contender, device: torch.device, seq_len: int, *, verify: bool = False
) -> Entry:
    """Time and peak of some steps of one length, in a process of their own."""
    modules = (contender.factory.partition(":")[0], *contender.preload)
    with contextlib.closing(Worker(contender.name, preload=modules)) as worker:
        where = {"group": str(BASE), "device": str(device), "batch_size": 1, "seq_len": seq_len}
        worker.make("step", contender.factory, **contender.arguments, **where)
        entry: Entry = {"seq_len": seq_len, **worker.call("step", "memory")}
        if verify:
            worker.call("step", "verify")
        seconds = worker.call("step", "warm_up", 0.0)  # the mean of its few steps
        worker.call("step", "loss_series")
        return {**entry, "seconds": seconds}


def test_every_contender_runs(group: dict[str, Entry]) -> None:
    """A peer that is not installed says so; what is ours must run."""
    for name, entry in group.items():
        assert "seconds" in entry or entry["role"] == "peer", f"{name}: {entry['cannot']}"


@pytest.mark.target
def test_longer_sequences_fit_at_no_loss_of_speed(group: dict[str, Entry]) -> None:
    compiled, ours = group[COMPILED.name], group[SELECTIVE.name]
    if "seconds" not in compiled:
        pytest.skip(f"nothing to compare with: {compiled['cannot']}")
    longer = ours["seq_len"] / compiled["seq_len"]
    assert longer >= LONGER, f"{ours['seq_len']} tokens are {longer:.2f} times {COMPILED.title}'s"
    speed = ours["flops_per_second"] / compiled["flops_per_second"]
    assert speed >= SPEED, f"there it has {speed:.2f} of the speed of {COMPILED.title}"
