"""The tables that a participant fills in, each by a function that returns its rows."""

import importlib.util
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
from tinyllama.harness.machine.files import check_writable
from tinyllama.harness.measure.memory import Allocations
from tinyllama.harness.measure.rounds import FEWEST_ROUNDS, interleaved, ratio
from tinyllama.model.tiers import V2
from tinyllama.ops import OPS
from tinyllama.ops.attention.configs import FORWARD
from tinyllama.profiling.block_sizes import (
    BLOCKS,
    CHIP,
    NEEDS_GPU,
    WIDTH,
    Rows,
    block_sizes,
    studied,
)
from tinyllama.profiling.op_times import measured
from tinyllama.workshop.running import group_for

TRANSACTION = 128  # bytes that a warp's 32 float32 values are fetched in
LENGTHS = (128, 256, 512, 1024, 2048)
ATTENTION_TOKENS = 1024
ATTENTION_BLOCKS = ((16, 32), (32, 32), (64, 32), (64, 64), (128, 32), (128, 64), (128, 128))


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
            made, time = studied(call, shapes, "bfloat16", device)
        numbers = (queries, keys, made.registers, made.spilled, made.shared // 1024)
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
    "attention-blocks": attention_blocks,
    "swiglu": swiglu,
    "fusion-gains": fusion_gains,
}


def check_picture(name: str, path: Path) -> None:
    """Raise UsageError for a picture that cannot be drawn or written, before anything is run."""
    if name != "attention-memory":
        raise UsageError(f"--picture draws attention-memory, not {name}: remove it")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"--picture needs matplotlib: {install('report')}")
    check_writable(path, "--picture")


def picture(rows: Rows, path: Path) -> None:
    """Draw the table of attention's memory, on axes on which every power is a line."""
    from matplotlib.figure import Figure

    lengths = [int(row[0]) for row in rows[1:]]
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for place, label in ((1, "eager"), (2, "flash")):
        axes.loglog(lengths, [float(row[place]) for row in rows[1:]], marker="o", label=label)
    axes.set(xlabel="tokens", ylabel="MiB allocated in the forward pass", xticks=lengths)
    axes.set_xticklabels([str(length) for length in lengths])
    axes.legend(frameon=False)
    figure.savefig(path, format="svg", metadata={"Date": None})


def _need_triton() -> None:
    if not HAS_TRITON:
        raise UsageError(f"this exercise needs triton: {install('triton')}")
