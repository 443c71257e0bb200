"""Each op by Triton and by PyTorch: time, speed-up, maximum error, bandwidth."""

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.evaluate import evaluate
from tinyllama.harness.declare.op import Op
from tinyllama.harness.kernels.precision import DTYPE_OF
from tinyllama.harness.measure.op_contender import OpContender, Timed, untimed
from tinyllama.ops import OPS

READINGS = 20
WARM_UP = 0.2  # seconds


def each(device: torch.device, dtype: str, names: Sequence[str] = ("triton", "eager")) -> list[Any]:
    """Every op that has these providers: the first is compared with the second."""
    return [
        measured(op, names, device, dtype)
        for op in OPS.values()
        if all(name in op.providers for name in names) and DTYPE_OF[dtype] in op.dtypes
    ]


def measured(op: Op, names: Sequence[str], device: torch.device, dtype: str) -> dict[str, Any]:
    """The maximum error on the smallest timed case, and the seconds of every pass on the next
    one; where a provider gives no time here, the reason."""
    mine, other = names
    case = OpCase(op, op[mine], op.timed[0], DTYPE_OF[dtype])
    inputs = case.inputs(device)
    wanted = evaluate(op, op[other].call, inputs)
    found = evaluate(op, op[mine].call, inputs, op[mine].overwrites)
    errors = [(found[name].double() - wanted[name].double()).abs().max().item() for name in found]
    facts: dict[str, Any] = {"op": op.name, "max_error": max(errors)}
    for name in names:
        if reason := untimed(op[name], device):
            return {**facts, "unavailable": reason}
    place = min(1, len(op.timed) - 1)
    dims = op.timed[place].dims
    seconds = {name: _seconds(Timed(op.name, name, place, dtype), device) for name in names}
    passes = {}
    for one in seconds[mine]:
        moved = op.bytes["forward"](DTYPE_OF[dtype].itemsize, **dims)
        if one != "forward":
            moved += op.bytes["backward"](DTYPE_OF[dtype].itemsize, **dims)
        fast = seconds[mine][one]
        passes[one] = {
            "seconds": fast,
            "other_seconds": seconds[other][one],
            "speedup": seconds[other][one] / fast,
            "bytes_per_second": moved / fast,
        }
    return {**facts, "case": str(op.timed[place]), "passes": passes}


def _seconds(timed: Timed, device: torch.device) -> dict[str, float]:
    """The median device seconds of every pass, each result checked."""
    contender = OpContender(timed, str(device), "tinyllama.ops")
    contender.run_once()
    contender.check_first()
    contender.warm_up(WARM_UP)
    turns = [contender.turn() for _ in range(READINGS)]
    return {one: statistics.median(turn[one].device for turn in turns) for one in turns[0]}
