"""Loss curves on real text: which runs have one, and how they are computed.

Random tokens would show nothing: their loss stays at ln(V) whether or not the model learns.
"""

from pathlib import Path

import torch

from tinyllama.harness.records.entries import CurveEntry
from tinyllama.model.config import WORKLOADS, TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import V3
from tinyllama.training.data import TextBytes
from tinyllama.training.step import TrainStep, products

GROUP, WORKLOAD, STEPS, WINDOW, EVERY = "curves-small", "small", 1000, 50, 10
TEXT = Path(__file__).resolve().parents[2] / "docs"
RUNS = (
    *(("v1", "fp64"), ("v1", "fp32"), ("v3", "fp32")),
    *(("v1", "bf16"), ("v3", "bf16"), ("v4", "bf16")),
)


def groups(device: torch.device) -> list[str]:
    """The curves of a device."""
    return [] if not_here(device) else [GROUP]


def not_here(device: torch.device) -> str | None:
    """Why no curve is recorded on a device; None if curves are."""
    if device.type == "cpu":
        return "a thousand steps of interpreted kernels take hours; curves are drawn on a GPU"
    return V3.cannot_run(device)


def curve(losses: torch.Tensor) -> torch.Tensor:
    """The losses of a run, smoothed over each window of steps."""
    return losses.unfold(0, WINDOW, 1).mean(-1)


def entry_of(tier: str, precision: str, curve: torch.Tensor) -> CurveEntry:
    return CurveEntry(
        name=f"curve/{WORKLOAD}/{tier}-{precision}",
        workload=WORKLOAD,
        contender=tier,
        precision=precision,
        steps=STEPS,
        window=WINDOW,
        every=EVERY,
        losses=[round(loss, 6) for loss in curve[::EVERY].tolist()],
    )


def losses_of(tier: str, precision: str, device: torch.device) -> torch.Tensor:
    """The loss of every step of a run (STEPS), float64 on the CPU."""
    shape = WORKLOADS[WORKLOAD]
    config = TrainConfig(
        batch_size=shape.batch_size,
        seq_len=shape.seq_len,
        precision="fp32" if precision == "fp64" else precision,
    )
    batches = TextBytes(TEXT, shape.model.vocab_size, config)
    with products(config.precision, device):
        model = TinyLlama(shape.model, tier).to(device)
        if precision == "fp64":
            model = model.double()
        step = TrainStep(model, config)
        step.prepare()
        losses = [step(*batches.batch(n)).detach().double().clone() for n in range(STEPS)]
    return torch.stack(losses).cpu()
