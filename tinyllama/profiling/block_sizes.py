"""What the size of a kernel's block changes: RMSNorm in the form that the documents analyse."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tinyllama.harness.declare.registry import Registry, load_file, providers_restored
from tinyllama.harness.kernels import HAS_TRITON
from tinyllama.harness.kernels.launch import recorded
from tinyllama.harness.kernels.resources import Resources, compile_launch
from tinyllama.harness.machine.distribution import install
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.measure.clock import Clock, queue_of
from tinyllama.ops import OPS

Rows = list[tuple[str, ...]]
LESSON = Path(__file__).resolve().parents[2] / "docs" / "workshop" / "solutions" / "rms_norm.py"
BLOCKS = (64, 128, 256, 512, 1024)
WIDTH, ROWS = 2048, 1024  # of the RMSNorm that the documents analyse
CHIP = "sm_90"  # that kernels are compiled for where there is no GPU
NEEDS_GPU = "needs a GPU"


def block_sizes(device: torch.device) -> Rows:
    """The lesson's RMSNorm by block size: what the compiler made, and on a GPU the time."""
    if not HAS_TRITON:
        raise UsageError(f"block sizes need triton: {install('triton')}")
    if not LESSON.is_file():
        raise UsageError(f"{LESSON} is not there: block sizes are studied in a checkout")
    with providers_restored(OPS.values()):
        module: Any = load_file(LESSON, Registry())
    rows: Rows = [("block size", "registers", "spilled bytes", "widest load", "microseconds")]
    for block in BLOCKS:
        module.BLOCK_SIZE = block
        shapes = ((1, ROWS, WIDTH), (WIDTH,))
        made, time = studied(lambda *x: module.Lesson.forward(*x, 1e-5), shapes, "float32", device)
        loads = f"{made.instructions.loads} B"
        rows.append((str(block), str(made.registers), str(made.spilled), loads, time))
    return rows


def studied(
    call: Callable[..., Any], shapes: Sequence[tuple[int, ...]], dtype: str, device: torch.device
) -> tuple[Resources, str]:
    """What the compiler makes of the first launch of a call, and on a GPU its microseconds."""
    kind = getattr(torch, dtype)
    with recorded(CHIP) as launches:
        call(*(torch.empty(shape, dtype=kind, device="meta") for shape in shapes))
    made = compile_launch(launches[0], CHIP)
    if device.type == "cpu":
        return made, NEEDS_GPU
    given = [torch.randn(shape, device=device).to(kind) for shape in shapes]
    clock = Clock(queue_of(device))
    call(*given)
    least = min(clock.read(lambda: call(*given)).device for _ in range(20))
    return made, f"{least * 1e6:.1f}"
