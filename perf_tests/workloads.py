"""What is timed here: workloads and precisions for the device at hand, and their steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from tinyllama.config import WORKLOADS, TrainConfig
from tinyllama.harness.device import cannot, default_device
from tinyllama.model import TinyLlama
from tinyllama.step import TrainStep, products
from tinyllama.tiers import Tier

DEVICE = default_device()
BATCHES = 8
ROUNDS = {"tiny": 30, "small": 100, "medium": 30}


@dataclass(frozen=True)
class Group:
    """A workload in a precision: what is compared is compared within one group."""

    workload: str
    precision: str

    def __str__(self) -> str:
        return f"{self.workload}-{self.precision}"


PRECISIONS = ("fp32", "tf32", "bf16")
ALL = [Group(w, p) for w in ("tiny", "small", "medium") for p in PRECISIONS]


def not_here(group: Group) -> str | None:
    """Why a group is not timed on this device; None when it is."""
    on_cpu = DEVICE.type == "cpu"
    if on_cpu and group.workload != "tiny":
        return f"the workload {group.workload} is timed on a GPU; a CPU is timed on tiny"
    if not on_cpu and group.workload == "tiny":
        return "the workload tiny is for machines without a GPU"
    reason = cannot(group.precision, DEVICE)
    return reason and f"{group.precision}: {reason}"


def only_here(group: Group) -> None:
    """Skip the rest of a test, with the reason, where its group is not timed."""
    reason = not_here(group)
    if reason:
        pytest.skip(reason)


@contextlib.contextmanager
def measured(group: Group) -> Iterator[None]:
    """The precision of a group, and afterwards none of its memory and compiled code.

    Compiled steps of other groups would count against the compiler's limit for one function,
    and their guards be tried in every call.
    """
    only_here(group)
    with products(group.precision, DEVICE):
        yield
    torch.compiler.reset()
    if DEVICE.type != "cpu":
        torch.cuda.empty_cache()


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
