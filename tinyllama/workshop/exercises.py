"""The tables that a participant fills in, each by a function that returns its rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tinyllama.bench.steps import TierStep
from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.evaluate import evaluate
from tinyllama.harness.kernels import HAS_TRITON
from tinyllama.harness.kernels.configs import Config
from tinyllama.harness.kernels.launch import recorded
from tinyllama.harness.machine.distribution import install
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.measure.memory import Allocations
from tinyllama.harness.measure.rounds import FEWEST_ROUNDS, interleaved, ratio
from tinyllama.model.tiers import V2
from tinyllama.ops import OPS
from tinyllama.ops.attention.configs import FORWARD
from tinyllama.profiling.op_times import (
    BLOCKS,
    CHIP,
    NEEDS_GPU,
    WIDTH,
    Rows,
    block_sizes,
    measured,
    studied,
)
from tinyllama.workshop.running import group_for

TRANSACTION = 128  # bytes that a warp's 32 float32 values are fetched in
LENGTHS = (128, 256, 512, 1024, 2048)
ATTENTION_TOKENS = 1024
ATTENTION_BLOCKS = ((16, 32), (32, 32), (64, 32), (64, 64), (128, 32), (128, 64), (128, 128))


def memory_pattern(device: torch.device) -> Rows:
    """Blocks and transactions of a row, by block size; arithmetic, the same on every machine."""
    rows: Rows = [("block size", "blocks", "transactions a block", "in all")]
    for block in BLOCKS:
        blocks, transactions = -(-WIDTH // block), -(-4 * block // TRANSACTION)
        rows.append((str(block), str(blocks), str(transactions), str(blocks * transactions)))
    return rows


def attention_memory(device: torch.device) -> Rows:
    """Bytes that attention allocates forward, by length: scores that are written, and flash
    attention, which is launched on tensors without memory. The same on every machine."""
    _need_triton()
    headings = ("eager MiB", "flash MiB", "eager, times the row above", "flash, times")
    rows: Rows = [("tokens", *headings)]
    before: dict[str, int] = {}
    for length in LENGTHS:
        peaks = {}
        for name in ("eager", "triton"):
            q, k, v = (torch.empty(1, length, heads, 64, device="meta") for heads in (8, 4, 4))
            with torch.no_grad(), recorded(CHIP), Allocations() as allocations:
                OPS["attention"][name].call(q, k, v)
            peaks[name] = allocations.peak
        growth = [f"{peaks[name] / before[name]:.2f}" if before else "-" for name in peaks]
        rows.append((str(length), *(f"{n / 2**20:.2f}" for n in peaks.values()), *growth))
        before = peaks
    return rows


def attention_blocks(device: torch.device) -> Rows:
    """Flash attention by the queries and keys of a block: what the compiler made of it, and on a
    GPU the time of the forward pass."""
    _need_triton()
    rows: Rows = [("queries", "keys", "registers", "spilled", "shared KiB", "microseconds")]
    shapes = [(1, ATTENTION_TOKENS, heads, 64) for heads in (8, 4, 4)]
    for queries, keys in ATTENTION_BLOCKS:
        config = Config(QM=queries, QN=keys, TURN=0, num_warps=4, num_stages=2)
        with FORWARD.force(config, D=64, kind="16bit", length="long"), torch.no_grad():
            call = OPS["attention"]["triton"].call
            kernel, time = studied(call, shapes, "bfloat16", device)
        numbers = (queries, keys, kernel.registers, kernel.spilled, kernel.shared // 1024)
        rows.append((*map(str, numbers), time))
    return rows


def swiglu(device: torch.device) -> Rows:
    """The naive kernel, and products by BLAS with a kernel for the activation, beside PyTorch."""
    _need_triton()
    rows: Rows = [("provider", "largest error", "forward us", "PyTorch us", "speed-up")]
    op = OPS["swiglu"]
    for name in ("naive", "triton"):
        if device.type == "cpu":  # interpreted: right or wrong is all that can be seen, of few rows
            case = OpCase(op, op[name], op.cases[0], torch.float32)
            mine, eager = (evaluate(op, op[p].call, case.inputs(device)) for p in (name, "eager"))
            errors = [(mine[key] - eager[key]).abs().max().item() for key in mine]
            rows.append((name, f"{max(errors):.1e}", *[NEEDS_GPU] * 3))
            continue
        facts = measured(op, (name, "eager"), device, "fp32")
        forward = facts["passes"]["forward"]
        times = (f"{forward[key] * 1e6:.1f}" for key in ("seconds", "other_seconds"))
        rows.append((name, f"{facts['max_error']:.1e}", *times, f"{forward['speedup']:.2f}"))
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


NOTES = {
    "memory-pattern": "a transaction moves 128 bytes: the blocks differ in number and not in all",
    "attention-memory": "eager attention writes T x T scores, so twice the tokens approach 4 times "
    "the memory; flash attention writes its result and a number a row, so 2 times",
}


EXERCISES: dict[str, Callable[[torch.device], Rows]] = {
    "block-sizes": block_sizes,
    "memory-pattern": memory_pattern,
    "attention-memory": attention_memory,
    "attention-blocks": attention_blocks,
    "swiglu": swiglu,
    "fusion-gains": fusion_gains,
}


def rows_of(name: str, device: torch.device, file: Path | None) -> Rows:
    """The table of an exercise; file: whose kernel block-sizes studies. Raises UsageError."""
    if file is None:
        return EXERCISES[name](device)
    if name != "block-sizes":
        raise UsageError(f"--file is for block-sizes, not {name}: remove it")
    return block_sizes(device, file)


def _need_triton() -> None:
    if not HAS_TRITON:
        raise UsageError(f"this exercise needs triton: {install('triton')}")
