"""The tables that a participant fills in, each by a function that returns its rows."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tinyllama.bench.steps import TierStep
from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.evaluate import evaluate
from tinyllama.harness.declare.registry import Registry, load_file, providers_restored
from tinyllama.harness.kernels import HAS_TRITON
from tinyllama.harness.kernels.configs import Config
from tinyllama.harness.kernels.launch import recorded
from tinyllama.harness.kernels.resources import Resources, compilation
from tinyllama.harness.machine.distribution import install
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.measure.clock import Clock, queue_of
from tinyllama.harness.measure.memory import Allocations
from tinyllama.harness.measure.op_contender import OpContender, Timed
from tinyllama.harness.measure.rounds import FEWEST_ROUNDS, interleaved, ratio
from tinyllama.model.tiers import V2
from tinyllama.ops import OPS
from tinyllama.ops.attention.configs import FORWARD
from tinyllama.workshop.running import group_for

Rows = list[tuple[str, ...]]
SOLUTION = Path(__file__).with_name("solutions") / "rms_norm.py"
BLOCKS = (64, 128, 256, 512, 1024)
WIDTH, ROWS = 2048, 1024  # of the RMSNorm that the published course analyses
CHIP = "sm_90"  # that kernels are compiled for where there is no GPU
NEEDS_GPU = "needs a GPU"
TRANSACTION = 128  # bytes: the 32 float32 values of a warp
LENGTHS = (128, 256, 512, 1024, 2048)
ATTENTION_TOKENS = 1024
ATTENTION_BLOCKS = ((16, 32), (32, 32), (64, 32), (64, 64), (128, 32), (128, 64), (128, 128))


def attention_memory(device: torch.device) -> Rows:
    """Bytes that the forward pass of attention allocates, by length: eager attention, which writes
    its scores, and flash attention. Tensors have no memory and nothing runs, so the figures are
    the same on every machine."""
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


def block_sizes(device: torch.device, file: Path = SOLUTION) -> Rows:
    """The RMSNorm of a file, a filled starter of exercise 5, by the size of its block: the blocks
    of a row, the transactions that fetch the row, the resources of the compiled kernel, and on a
    GPU its time. Raises UsageError for a file that does not run."""
    headings = ("blocks of a row", "transactions", "registers", "spilled bytes", "widest load")
    rows: Rows = [("block size", *headings, "microseconds")]
    shapes = ((1, ROWS, WIDTH), (WIDTH,))
    with providers_restored(OPS.values()):
        try:
            module: Any = load_file(file, Registry())
            forward = module.Lesson.forward
            for block in BLOCKS:
                module.BLOCK_SIZE = block
                kernel, time = studied(lambda *x: forward(*x, 1e-5), shapes, "float32", device)
                blocks, transactions = -(-WIDTH // block), -(-4 * block // TRANSACTION)
                figures = (block, blocks, blocks * transactions, kernel.registers, kernel.spilled)
                rows.append((*map(str, figures), f"{kernel.loads} B", time))
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


def attention_blocks(device: torch.device) -> Rows:
    """Flash attention by the queries and keys of a block: what the compiler made of it, and on a
    GPU the time of the forward pass."""
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
    """The naive kernel, and products by BLAS with a kernel for the activation, beside PyTorch. On a
    CPU, where they are interpreted, only whether they are right."""
    rows: Rows = [("provider", "largest error", "forward us", "PyTorch us", "speed-up")]
    op = OPS["swiglu"]
    on_gpu = device.type != "cpu"
    theirs = _forward_seconds("eager", device) if on_gpu else 0.0
    for name in ("naive", "triton"):
        case = OpCase(op, op[name], (op.timed if on_gpu else op.cases)[0], torch.float32)
        results, eager = (
            evaluate(op, op[provider].call, case.inputs(device)) for provider in (name, "eager")
        )
        error = max((results[key] - eager[key]).abs().max().item() for key in results)
        times = [NEEDS_GPU] * 3
        if on_gpu:
            seconds = _forward_seconds(name, device)
            times = [f"{seconds * 1e6:.1f}", f"{theirs * 1e6:.1f}", f"{theirs / seconds:.2f}"]
        rows.append((name, f"{error:.1e}", *times))
    return rows


def _forward_seconds(provider: str, device: torch.device) -> float:
    """The median device seconds of SwiGLU's forward pass, each result checked."""
    timed = Timed("swiglu", provider, 1, "fp32")
    contender = OpContender(timed, str(device), "tinyllama.ops")
    contender.run_once()
    contender.check_first()
    contender.warm_up(0.2)
    return statistics.median(contender.turn()["forward"].device for _ in range(20))


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
    "block-sizes": "a transaction moves 128 bytes: its number does not depend on the block size",
    "attention-memory": "eager attention writes T x T scores, so twice the tokens approach 4 times "
    "the memory; flash attention writes its result and a number a row, so 2 times",
}


def rows_of(name: str, device: torch.device, file: Path | None) -> Rows:
    """The table of an exercise, by the function of its name; file: whose kernel block-sizes
    studies. Raises UsageError."""
    if not HAS_TRITON and name != "fusion-gains":
        raise UsageError(f"this exercise needs triton: {install('triton')}")
    if file is not None:
        return block_sizes(device, file)
    rows: Rows = globals()[name.replace("-", "_")](device)
    return rows
