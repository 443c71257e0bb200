"""What is timed here: workloads and precisions for the device at hand, and their steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tinyllama.config import WORKLOADS, TrainConfig
from tinyllama.harness.device import cannot, default_device
from tinyllama.model import TinyLlama
from tinyllama.step import TrainStep
from tinyllama.tiers import Tier

DEVICE = default_device()
BATCHES = 8


@dataclass(frozen=True)
class Group:
    """A workload in a precision: what is compared is compared within one group."""

    workload: str
    precision: str

    def __str__(self) -> str:
        return f"{self.workload}-{self.precision}"


def groups() -> list[Group]:
    """On a GPU the documented workloads; on a CPU the small model at a shorter batch."""
    names = ("tiny",) if DEVICE.type == "cpu" else ("small", "medium")
    return [
        Group(name, precision)
        for name in names
        for precision in ("fp32", "tf32", "bf16")
        if cannot(precision, DEVICE) is None
    ]


class Stepper:
    """A prepared training step that takes fresh random tokens at each call."""

    def __init__(self, group: Group, tier: str | Tier) -> None:
        workload = WORKLOADS[group.workload]
        config = TrainConfig(
            batch_size=workload.batch_size, seq_len=workload.seq_len, precision=group.precision
        )
        self.batch_size = workload.batch_size
        self.model = TinyLlama(workload.model, tier).to(DEVICE)
        self.step = TrainStep(self.model, config)
        self.step.prepare()
        shape = (BATCHES, config.batch_size, config.seq_len + 1)
        generator = torch.Generator().manual_seed(0)
        vocab = workload.model.vocab_size
        self.batches = torch.randint(vocab, shape, generator=generator).to(DEVICE)
        self.calls = 0

    def __call__(self) -> torch.Tensor:
        batch = self.batches[self.calls % BATCHES]
        self.calls += 1
        return self.step(batch[:, :-1], batch[:, 1:])

    def check(self) -> None:
        """No time without a right step: the loss is finite, every parameter learns."""
        assert self().isfinite(), "the loss is not finite"
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None, f"{name} has no gradient"
            assert parameter.grad.isfinite().all(), f"{name} has a gradient that is not finite"
            assert parameter.grad.any(), f"{name} has a gradient of zeros"
