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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from perf_tests.conftest import Ceilings
from tinyllama.bench.contender import Contender
from tinyllama.bench.measure import CONTENDERS
from tinyllama.bench.workloads import LARGE, Group, not_here
from tinyllama.harness.machine.worker import Worker, WorkerError

BASE = Group.parse(LARGE)
GROUP = f"longest-{BASE}"
SHORTER = (4096, 16384)  # tokens
STEP = 1024  # tokens
ROOM = 0.94  # of the card's memory: the rest is a process's own, and what its allocator wastes
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
BOTH = (COMPILED, SELECTIVE)
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
        grown = _grown([c for c in BOTH if c.cannot(device, GROUP) is None], device)
        found: dict[str, Entry] = {}
        enough = math.inf
        for contender in BOTH:
            entry = _entry(contender, device, ceilings, grown.get(contender.name), enough)
            enough = ENOUGH * entry.get("seq_len", math.inf)
            record.add(f"longest/{BASE}/{contender.name}", "longest", **entry)
            found[contender.name] = entry
        yield found


def _entry(
    contender: Contender,
    device: torch.device,
    ceilings: Ceilings,
    grown: list[int] | WorkerError | None,
    enough: float,
) -> Entry:
    entry = {**vars(BASE), "contender": contender.name, "role": contender.role, "batch_size": 1}
    if grown is None:
        return {**entry, "cannot": contender.cannot(device, GROUP)}
    try:
        if isinstance(grown, WorkerError):
            raise grown
        entry |= _longest(contender, device, grown, enough)
    except WorkerError as error:
        return {**entry, "cannot": str(error)}
    flops = BASE.shape.model.step_flops(1, entry["seq_len"]) / entry["seconds"]
    return {**entry, "flops_per_second": flops, "mfu": flops / ceilings.product(BASE.precision)}


def _grown(
    contenders: Sequence[Contender], device: torch.device
) -> dict[str, list[int] | WorkerError]:
    """The peak at each of the shorter lengths, in bytes, or why there is none; the gradients are
    right at the first. All are made side by side, since compiling leaves the device idle."""
    with contextlib.ExitStack() as stack:
        tasks = [(contender, length) for contender in contenders for length in SHORTER]
        workers = {
            (contender.name, length): stack.enter_context(_worker(contender))
            for contender, length in tasks
        }

        def peak(contender: Contender, length: int) -> int | WorkerError:
            worker = workers[contender.name, length]
            try:
                _make(worker, contender, device, length)
                found: int = worker.call("step", "memory")["peak_bytes"]
                if length != SHORTER[0]:
                    worker.drop("step")
            except WorkerError as error:
                return error
            return found

        with ThreadPoolExecutor(len(tasks) or 1) as pool:
            peaks = list(pool.map(peak, *zip(*tasks, strict=True))) if tasks else []
        found: dict[str, list[int] | WorkerError] = {}
        for contender in contenders:
            own = [p for p, (c, _) in zip(peaks, tasks, strict=True) if c is contender]
            failed = [one for one in own if isinstance(one, WorkerError)]
            bytes_ = [one for one in own if not isinstance(one, WorkerError)]
            try:
                if not failed:
                    worker = workers[contender.name, SHORTER[0]]
                    worker.call("step", "verify")
                    worker.drop("step")
            except WorkerError as error:
                failed = [error]
            found[contender.name] = failed[0] if failed else bytes_
        return found


def _longest(contender: Contender, device: torch.device, grown: list[int], enough: float) -> Entry:
    """Raises WorkerError, of the last length that was tried."""
    (short, long), (less, more) = SHORTER, grown
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


def _worker(contender: Contender) -> Worker:
    modules = (contender.factory.partition(":")[0], *contender.preload)
    return Worker(contender.name, preload=modules)


def _make(worker: Worker, contender: Contender, device: torch.device, seq_len: int) -> None:
    where: dict[str, Any] = {"group": str(BASE), "device": str(device), "seq_len": seq_len}
    worker.make("step", contender.factory, **contender.arguments, **where, batch_size=1, warm_ups=1)


def _measured(contender: Contender, device: torch.device, seq_len: int) -> Entry:
    """Time and peak of some steps of one length, in a process of their own."""
    with _worker(contender) as worker:
        _make(worker, contender, device, seq_len)
        entry: Entry = {"seq_len": seq_len, **worker.call("step", "memory")}
        seconds = worker.call("step", "warm_up", 0.0, 1)  # of one more: a step takes seconds
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
