"""Each op by Triton and by PyTorch: time, speed-up, maximum error, bandwidth; and what the size of
a kernel's block changes."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.evaluate import evaluate
from tinyllama.harness.declare.op import Op
from tinyllama.harness.declare.registry import Registry, load_file, providers_restored
from tinyllama.harness.kernels import HAS_TRITON
from tinyllama.harness.kernels.launch import recorded
from tinyllama.harness.kernels.precision import DTYPE_OF
from tinyllama.harness.kernels.resources import Resources, compilation
from tinyllama.harness.machine.distribution import install
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.measure.clock import Clock, queue_of
from tinyllama.harness.measure.op_contender import OpContender, Timed, untimed
from tinyllama.ops import OPS

Rows = list[tuple[str, ...]]
READINGS = 20
WARM_UP = 0.2  # seconds
# The RMSNorm of exercise 5, whose block has a size of its own.
LESSON = Path(__file__).resolve().parents[1] / "workshop" / "solutions" / "rms_norm.py"
BLOCKS = (64, 128, 256, 512, 1024)
WIDTH, ROWS = 2048, 1024  # of the RMSNorm that the published course analyses
CHIP = "sm_90"  # that kernels are compiled for where there is no GPU
NEEDS_GPU = "needs a GPU"


def op_times(
    device: torch.device, dtype: str, names: Sequence[str] = ("triton", "eager")
) -> list[Any]:
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
    expected = evaluate(op, op[other].call, inputs)
    results = evaluate(op, op[mine].call, inputs, op[mine].overwrites)
    errors = [(results[key].double() - expected[key].double()).abs().max() for key in results]
    facts: dict[str, Any] = {"op": op.name, "max_error": max(errors).item()}
    for name in names:
        if reason := untimed(op[name], device):
            return {**facts, "unavailable": reason}
    place = min(1, len(op.timed) - 1)
    seconds = {name: _seconds(Timed(op.name, name, place, dtype), device) for name in names}
    passes = {}
    for direction, fast in seconds[mine].items():
        of_pass = ["forward"] if direction == "forward" else ["forward", "backward"]
        moved = sum(
            op.bytes[name](DTYPE_OF[dtype].itemsize, **op.timed[place].dims) for name in of_pass
        )
        passes[direction] = {
            "seconds": fast,
            "other_seconds": seconds[other][direction],
            "speedup": seconds[other][direction] / fast,
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
    return {name: statistics.median(turn[name].device for turn in turns) for name in turns[0]}


def block_sizes(device: torch.device, file: Path = LESSON) -> Rows:
    """The RMSNorm of a file by the size of its block: what the compiler gives it, and on a GPU its
    time. file: a starter of exercise 5, filled in. Raises UsageError for one that does not run."""
    if not HAS_TRITON:
        raise UsageError(f"block sizes need triton: {install('triton')}")
    rows: Rows = [("block size", "registers", "spilled bytes", "widest load", "microseconds")]
    shapes = ((1, ROWS, WIDTH), (WIDTH,))
    with providers_restored(OPS.values()):
        try:
            module: Any = load_file(file, Registry())
            forward = module.Lesson.forward
            for block in BLOCKS:
                module.BLOCK_SIZE = block
                kernel, time = studied(lambda *x: forward(*x, 1e-5), shapes, "float32", device)
                loads = f"{kernel.loads} B"
                rows.append((str(block), str(kernel.registers), str(kernel.spilled), loads, time))
        except UsageError:
            raise
        except Exception as error:  # of a file that somebody is writing
            reason = " ".join(f"{type(error).__name__}: {error}".split())[-300:]
            raise UsageError(f"{file} does not run yet: {reason}: fill in its blanks") from error
    return rows


def studied(
    call: Callable[..., Any], shapes: Sequence[tuple[int, ...]], dtype: str, device: torch.device
) -> tuple[Resources, str]:
    """What the compiler makes of the first launch of a call, and on a GPU its microseconds."""
    kind = getattr(torch, dtype)
    with recorded(CHIP) as launches:
        call(*(torch.empty(shape, dtype=kind, device="meta") for shape in shapes))
    resources = compilation(launches[0], CHIP).run()
    if device.type == "cpu":
        return resources, NEEDS_GPU
    inputs = [torch.randn(shape, device=device).to(kind) for shape in shapes]
    clock = Clock(queue_of(device))
    call(*inputs)
    fastest = min(clock.read(lambda: call(*inputs)).device for _ in range(20))
    return resources, f"{fastest * 1e6:.1f}"
