"""The longest sequence that one GPU trains on, V3 against torch.compile.

Each has the GPU to itself, with a batch of one. Two shorter lengths show how its memory grows. The
longest is the largest multiple of `STEP` that then runs; for V3 at most `ENOUGH` times that of
torch.compile, because time grows with the square of the length. Speed is in model FLOPs per second,
with only the unmasked half of causal attention, since the cost of a token grows with the length.
Gradients are compared with the reference at the shortest length: at the longest, the scores of one
layer of the reference do not fit on the GPU.
"""

import math
from dataclasses import replace as with_fields
from typing import Any

import torch
from msgspec.structs import replace

from tinyllama.bench.ceilings import Ceilings
from tinyllama.bench.contender import Contender
from tinyllama.bench.measure import CONTENDERS
from tinyllama.bench.workloads import LARGE, Group, not_here
from tinyllama.harness.machine.worker import WorkerError
from tinyllama.harness.records.entries import LongestEntry

BASE = Group.parse(LARGE)
GROUP = f"longest-{BASE}"
SHORTER = (4096, 16384)  # tokens
STEP = 1024  # tokens
ROOM = 0.94  # of the GPU's memory: the process's context and fragmentation take the rest
SHRINK = 0.96  # tried next, where a length does not fit
ENOUGH = 1.6

_V3 = next(contender for contender in CONTENDERS if contender.name == "v3")
COMPILED = next(contender for contender in CONTENDERS if contender.name == "hf-compile")
SELECTIVE = with_fields(
    _V3,
    name="v3-selective",
    title=f"{_V3.title}, selective memory",
    arguments={**_V3.arguments, "memory": "selective"},
)


def groups(device: torch.device) -> list[str]:
    """The group, where the device takes it."""
    return [] if not_here(BASE, device) else [GROUP]


def measure(device: torch.device, ceilings: Ceilings) -> dict[str, LongestEntry]:
    """The longest sequence of each contender: an entry by contender."""
    entries: dict[str, LongestEntry] = {}
    most = math.inf
    for contender in (COMPILED, SELECTIVE):
        name = f"longest/{BASE}/{contender.name}"
        entry = LongestEntry(name=name, batch_size=1, **contender.about(BASE))
        reason = contender.cannot(device, GROUP)
        try:
            figures = {"cannot": reason} if reason else _longest(contender, device, most)
            entry = replace(entry, **figures)
        except WorkerError as error:
            entry = replace(entry, cannot=str(error))
        if (length := entry.seq_len) is not None:
            flops = BASE.shape.model.step_flops(1, length) / entry.time
            mfu = flops / ceilings.product(BASE.precision)
            entry = replace(entry, flops_per_second=flops, mfu=mfu)
            most = ENOUGH * length
        entries[contender.name] = entry
    return entries


def _longest(contender: Contender, device: torch.device, most: float) -> dict[str, Any]:
    """The fields of an entry at the longest length. Raises the WorkerError of the last length that
    was tried."""
    short, long = SHORTER
    less = _measured(contender, device, short, verify=True)["peak_bytes"]
    per_token = (_measured(contender, device, long)["peak_bytes"] - less) / (long - short)
    _, total = torch.cuda.mem_get_info(device)
    length = int(min(most, short + (ROOM * total - less) / per_token))
    while True:
        length = length // STEP * STEP
        try:
            figures = _measured(contender, device, length, timed=True)
        except WorkerError:
            length = int(SHRINK * length)
            if length <= long:
                raise
        else:
            return {**figures, "bytes_per_token": per_token, "seq_len": length}


def _measured(
    contender: Contender,
    device: torch.device,
    seq_len: int,
    *,
    verify: bool = False,
    timed: bool = False,
) -> dict[str, Any]:
    """Bytes of a step of one length, in a process of its own; verify: its gradients; timed: the
    seconds of one more."""
    where: dict[str, Any] = {"group": str(BASE), "device": str(device), "seq_len": seq_len}
    where |= {**contender.arguments, "batch_size": 1, "warm_ups": 1}
    with contender.worker() as worker:
        worker.make("step", contender.factory, **where)
        figures: dict[str, Any] = worker.call("step", "memory")
        if verify:
            worker.call("step", "verify")
        if timed:
            figures["seconds"] = worker.call("step", "warm_up", 0.0, 1)  # a step takes seconds
            worker.call("step", "loss_series")
        return figures
