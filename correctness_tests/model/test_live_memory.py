"""With every parameter learning, tiers hold the same bytes between steps.

The published example counts 46% less for its kernels, and all of that is AdamW state of
parameters that got no gradient. Parameters, gradients and two moments are what a step leaves,
whoever computed it.
"""

from typing import Any

import pytest
import torch

from tinyllama.bench.held import Training, everything, held
from tinyllama.harness.machine.device import cannot
from tinyllama.model.config import PRESETS, ModelConfig, TrainConfig
from tinyllama.model.optim import AdamW
from tinyllama.training.step import TrainStep

CPU = torch.device("cpu")
SAME = 0.02
TINY = ModelConfig(hidden_dim=32, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=48)
BATCH: dict[str, dict[str, Any]] = {
    "cpu": {"batch_size": 1, "seq_len": 8},
    "cuda": {"batch_size": 8, "seq_len": 128},
}


def shape_on(device: torch.device) -> ModelConfig:
    """The documented workload; on a CPU, where kernels are interpreted, a tiny one."""
    return TINY if device.type == "cpu" else PRESETS["small"]


def embedding_alone(step: TrainStep, tokens: torch.Tensor) -> None:
    """As if backward ended at the final norm, with states only of what has a gradient."""
    model = step.model
    step.optimizer = step.update.optimizer = AdamW(
        [model.embedding], step.config, model.tier.table["adamw"]
    )
    everything(step, tokens)
    for parameter in model.parameters():
        if parameter is not model.embedding:
            parameter.grad = None


def held_after(tier: str, device: torch.device, train: Training = everything) -> int:
    """Bytes that a model and its step hold after they trained once, uncaptured, in float32."""
    return held(shape_on(device), tier, TrainConfig(**BATCH[device.type]), device, train).live


def within(size: int, expected: float) -> bool:
    return abs(size / expected - 1) <= SAME


@pytest.fixture
def by_v1(device: torch.device) -> int:
    return held_after("v1", device)


def test_v1_holds_parameters_gradients_and_two_moments(by_v1: int, device: torch.device) -> None:
    assert within(by_v1, 4 * 4 * shape_on(device).parameters)


@pytest.mark.long
@pytest.mark.parametrize("tier", ["v2", "v3"])
def test_a_tier_holds_after_a_step_what_v1_holds(
    tier: str, by_v1: int, device: torch.device
) -> None:
    reason = cannot("triton", device) if tier == "v3" else None
    if reason:
        pytest.skip(reason)
    size = held_after(tier, device)
    assert within(size, by_v1), f"{tier} holds {size:,} bytes, v1 {by_v1:,}"


def test_a_step_in_which_only_the_embedding_learns_holds_less(
    by_v1: int, device: torch.device
) -> None:
    size = held_after("v1", device, embedding_alone)
    model = shape_on(device)
    learning = model.vocab_size * model.hidden_dim
    assert within(size, 4 * (model.parameters + 3 * learning))
    assert not within(size, by_v1)


# -- the counter that a CPU needs -----------------------------------------------------------------
