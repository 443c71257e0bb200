"""The tables that a participant fills in, each by a function that returns its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tinyllama.bench.steps import TierStep
from tinyllama.harness.correct.cases import OpCase
from tinyllama.harness.correct.evaluate import evaluate
from tinyllama.harness.kernels import HAS_TRITON
from tinyllama.harness.kernels.launch import recorded
from tinyllama.harness.machine.distribution import install
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.measure.memory import Allocations
from tinyllama.harness.measure.rounds import FEWEST_ROUNDS, interleaved, ratio
from tinyllama.model.tiers import V2
from tinyllama.ops import OPS
from tinyllama.profiling.block_sizes import BLOCKS, CHIP, NEEDS_GPU, WIDTH, Rows, block_sizes
from tinyllama.profiling.op_times import measured
from tinyllama.workshop.running import group_for

TRANSACTION = 128  # bytes that a warp's 32 float32 values are fetched in
LENGTHS = (128, 256, 512, 1024, 2048)


def memory_pattern(device: torch.device) -> Rows:
    """Blocks and transactions of a row, by block size; arithmetic, the same on every machine."""
    rows: Rows = [("block size", "blocks", "transactions a block", "in all")]
    for block in BLOCKS:
        blocks, each = -(-WIDTH // block), -(-4 * block // TRANSACTION)
        rows.append((str(block), str(blocks), str(each), str(blocks * each)))
    return rows


def attention_memory(device: torch.device) -> Rows:
    """Bytes that attention allocates forward, by length: scores that are written, and flash
    attention, which is launched on tensors without memory. The same on every machine."""
    _need_triton()
    rows: Rows = [("length", "eager MiB", "flash MiB", "eager, times the last", "flash")]
    last: dict[str, int] = {}
    for length in LENGTHS:
        found = {}
        for name in ("eager", "triton"):
            q, k, v = (torch.empty(1, length, heads, 64, device="meta") for heads in (8, 4, 4))
            with torch.no_grad(), recorded(CHIP), Allocations() as seen:
                OPS["attention"][name].call(q, k, v)
            found[name] = seen.peak
        growth = [f"{found[n] / last[n]:.2f}" if last else "-" for n in found]
        rows.append((str(length), *(f"{n / 2**20:.2f}" for n in found.values()), *growth))
        last = found
    return rows


def swiglu(device: torch.device) -> Rows:
    """The naive kernel, and products by BLAS with a kernel for the activation, beside PyTorch."""
    _need_triton()
    rows: Rows = [("provider", "largest error", "forward us", "PyTorch us", "speed-up")]
    op = OPS["swiglu"]
    for name in ("naive", "triton"):
        if device.type == "cpu":  # interpreted: right or wrong is all that can be seen, of few rows
            case = OpCase(op, op[name], op.cases[0], torch.float32)
            results = [evaluate(op, op[one].call, case.inputs(device)) for one in (name, "eager")]
            errors = [(results[0][key] - results[1][key]).abs().max().item() for key in results[0]]
            rows.append((name, f"{max(errors):.1e}", *[NEEDS_GPU] * 3))
            continue
        found = measured(op, (name, "eager"), device, "fp32")
        one = found["passes"]["forward"]
        times = (f"{one[key] * 1e6:.1f}" for key in ("seconds", "other_seconds"))
        rows.append((name, f"{found['max_error']:.1e}", *times, f"{one['speedup']:.2f}"))
    return rows


def fusion_gains(device: torch.device) -> Rows:
    """What each part of V2 gains: a step without it over a step with all, timed alternately."""
    where: dict[str, Any] = {"group": str(group_for(device)), "device": str(device)}
    steps = {"all": TierStep("v2", **where)}
    for part in V2.switches:
        steps[part] = TierStep("v2", without=[part], **where)
    for step in steps.values():
        step.warm_up(0.1)

    def turn(step: TierStep) -> Callable[[], float]:
        return lambda: step.turn(3)

    seconds = interleaved({name: turn(step) for name, step in steps.items()}, FEWEST_ROUNDS)
    rows: Rows = [("part", "a step without it takes, times that with it [99%]")]
    rows += [(part, str(ratio(seconds[part], seconds["all"]))) for part in V2.switches]
    return rows


EXERCISES: dict[str, Callable[[torch.device], Rows]] = {
    "block-sizes": block_sizes,
    "memory-pattern": memory_pattern,
    "attention-memory": attention_memory,
    "swiglu": swiglu,
    "fusion-gains": fusion_gains,
}


def _need_triton() -> None:
    if not HAS_TRITON:
        raise UsageError(f"this exercise needs triton: {install('triton')}")
