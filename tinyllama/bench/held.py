"""The memory that a model and its step hold between steps, uncaptured like the published program.

That program prints what is allocated after a step. A captured step cannot be compared with it,
because the pool of its graph holds the activations too.
"""

import gc
from dataclasses import dataclass

import torch

from tinyllama.harness.machine.device import synchronize
from tinyllama.harness.measure.memory import Allocations, forget_peak, live_bytes, peak_bytes
from tinyllama.model.config import ModelConfig, TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import StepPlan, Tier
from tinyllama.training.step import TrainStep, products


@dataclass(frozen=True)
class Held:
    """Bytes of a model and its step, gradients and optimizer states included: after a step, and at
    most during it."""

    live: int
    peak: int


def held(
    model: ModelConfig,
    tier: str | Tier,
    settings: TrainConfig,
    device: torch.device,
) -> Held:
    """Train one uncaptured step of a new model in float32. On a GPU bytes are the allocator's, on a
    CPU those of the tensors that operators returned."""
    generator = torch.Generator().manual_seed(0)
    size = (settings.batch_size, settings.seq_len + 1)
    tokens = torch.randint(model.vocab_size, size, generator=generator).to(device)
    on_gpu = device.type != "cpu"
    for _ in range(2 if on_gpu else 1):  # in the first step libraries allocate memory of their own
        step: TrainStep | None = None
        gc.collect()
        before = live_bytes(device) if on_gpu else 0
        forget_peak(device)
        with products("fp32", device), Allocations() as allocated:
            step = TrainStep(TinyLlama(model, tier).to(device), settings, StepPlan())
            step(tokens)
        synchronize(device)
        peak = peak_bytes(device) - before if on_gpu else allocated.peak
        gc.collect()
        live = live_bytes(device) - before if on_gpu else allocated.live
        assert step.optimizer.steps.item() == 1
    return Held(live, peak)
