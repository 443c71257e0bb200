"""The longest sequence that one GPU trains on, V3 against torch.compile.

Each has the GPU to itself, with a batch of one. Two shorter lengths show how its memory grows. The
longest is the largest multiple of `STEP` that then runs; for V3 at most `ENOUGH` times that of
torch.compile, because time grows with the square of the length. Speed is in model FLOPs per second,
with only the unmasked half of causal attention, since the cost of a token grows with the length.
Gradients are compared with the reference at the shortest length: at the longest, the scores of one
layer of the reference do not fit on the GPU.
"""

import contextlib
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from tinyllama.bench.ceilings import Ceilings
from tinyllama.bench.contender import Contender
from tinyllama.bench.measure import CONTENDERS
from tinyllama.bench.workloads import LARGE, Group, not_here
from tinyllama.harness.machine.worker import Worker, WorkerError
from tinyllama.harness.records.entries import LongestEntry

BASE = Group.parse(LARGE)
GROUP = f"longest-{BASE}"
SHORTER = (4096, 16384)  # tokens
STEP = 1024  # tokens
ROOM = 0.94  # of the GPU's memory: the process's context and fragmentation take the rest
SHRINK = 0.96  # tried next, where a length does not fit
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


def groups(device: torch.device) -> list[str]:
    """The group, where the device takes it."""
    return [] if not_here(BASE, device) else [GROUP]


def measure(device: torch.device, ceilings: Ceilings) -> dict[str, LongestEntry]:
    """The longest sequence of each contender: an entry by contender."""
    grown = _grown([c for c in BOTH if c.cannot(device, GROUP) is None], device)
    found: dict[str, LongestEntry] = {}
    enough = math.inf
    for contender in BOTH:
        entry = _entry(contender, device, ceilings, grown.get(contender.name), enough)
        enough = ENOUGH * (entry.seq_len or math.inf)
        found[contender.name] = entry
    return found


def _entry(
    contender: Contender,
    device: torch.device,
    ceilings: Ceilings,
    grown: list[int] | WorkerError | None,
    enough: float,
) -> LongestEntry:
    name = f"longest/{BASE}/{contender.name}"
    entry = LongestEntry(name=name, batch_size=1, **contender.about(BASE))
    if grown is None:
        return replace(entry, cannot=contender.cannot(device, GROUP))
    if isinstance(grown, WorkerError):
        return replace(entry, cannot=str(grown))
    try:
        entry = _longest(entry, contender, device, grown, enough)
    except WorkerError as error:
        return replace(entry, cannot=str(error))
    assert entry.seq_len is not None
    flops = BASE.shape.model.step_flops(1, entry.seq_len) / entry.time
    return replace(entry, flops_per_second=flops, mfu=flops / ceilings.product(BASE.precision))


def _grown(
    contenders: Sequence[Contender], device: torch.device
) -> dict[str, list[int] | WorkerError]:
    """The peak at each of the shorter lengths, in bytes, or why there is none; the gradients are
    verified at the first. All are made at the same time, since compiling leaves the device idle."""
    with contextlib.ExitStack() as stack:
        tasks = [(contender, length) for contender in contenders for length in SHORTER]
        workers = {
            (contender.name, length): stack.enter_context(contender.worker())
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
                worker.close()  # the others need the memory that it holds
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
                with workers[contender.name, SHORTER[0]] as worker:
                    if not failed:
                        worker.call("step", "verify")
            except WorkerError as error:
                failed = [error]
            found[contender.name] = failed[0] if failed else bytes_
        return found


def _longest(
    entry: LongestEntry,
    contender: Contender,
    device: torch.device,
    grown: Sequence[int],
    enough: float,
) -> LongestEntry:
    """Raises the WorkerError of the last length that was tried."""
    (short, long), (less, more) = SHORTER, grown
    per_token = (more - less) / (long - short)
    _, total = torch.cuda.mem_get_info(device)
    length = int(min(enough, short + (ROOM * total - less) / per_token))
    while True:
        length = length // STEP * STEP
        try:
            found = _measured(contender, device, length)
        except WorkerError:
            length = int(SHRINK * length)
            if length <= long:
                raise
        else:
            return replace(entry, bytes_per_token=per_token, seq_len=length, **found)


def _make(worker: Worker, contender: Contender, device: torch.device, seq_len: int) -> None:
    where: dict[str, Any] = {"group": str(BASE), "device": str(device), "seq_len": seq_len}
    worker.make("step", contender.factory, **contender.arguments, **where, batch_size=1, warm_ups=1)


def _measured(contender: Contender, device: torch.device, seq_len: int) -> dict[str, Any]:
    """Time and peak of some steps of one length, in a process of their own."""
    with contender.worker() as worker:
        _make(worker, contender, device, seq_len)
        found: dict[str, Any] = worker.call("step", "memory")
        seconds = worker.call("step", "warm_up", 0.0, 1)  # of one more: a step takes seconds
        worker.call("step", "loss_series")
        return {**found, "seconds": seconds}
