"""A captured step follows all that changes between its replays: batch, rate, weights, state."""

from typing import Any

import pytest
import torch

from correctness_tests.support.steps import (
    BATCH,
    RATES,
    SHAPE,
    assert_same_training,
    must_capture,
    run,
    tokens,
)
from tinyllama.model.config import TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import TIERS, StepPlan
from tinyllama.training import checkpoint
from tinyllama.training.step import TrainStep, products

CAPTURED = [name for name, tier in TIERS.items() if not tier.counts_on_host]
LIMIT = 0.5
ALLOWED = {"fp32": 1e-5, "bf16": 1e-4}


def prepared(tier: str, device: torch.device, **settings: Any) -> TrainStep:
    must_capture(tier, device)
    model = TinyLlama(SHAPE, tier).to(device)
    step = TrainStep(model, TrainConfig(**BATCH, **settings), StepPlan(capture=True))
    step.prepare()
    assert step.graphs
    return step


def losses(step: TrainStep, *numbers: int) -> list[float]:
    values = []
    for number in numbers:
        batch = tokens(number).to(step.device)
        values.append(step(batch[:, :-1], batch[:, 1:]).item())
    return values


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": LIMIT, "accumulate": 2}], ids=str)
@pytest.mark.parametrize("tier", CAPTURED)
def test_replay_follows_batches_and_rates(
    tier: str, options: dict[str, Any], precision: str, device: torch.device
) -> None:
    must_capture(tier, device)
    settings: dict[str, Any] = {"steps": 6, "precision": precision, "rates": RATES, **options}
    expected = run(tier, device, plan=StepPlan(), **settings)
    got = run(tier, device, plan=StepPlan(capture=True), **settings)
    assert_same_training(got, expected, ALLOWED[precision])


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("tier", CAPTURED)
def test_replay_follows_weights_and_state_that_are_loaded(
    tier: str, precision: str, device: torch.device, tmp_path: Any
) -> None:
    """By a checkpoint and by torch's own loading: a cast of the weights must not be kept."""
    path, rel = tmp_path / "saved", ALLOWED[precision]
    with products(precision, device):
        step = prepared(tier, device, precision=precision, seed=1)
        checkpoint.save(path, step, 1, {"kind": "random tokens"})
        stored = checkpoint.load(path)
        for name, tensor in stored.tensors.items():  # those of another run
            if name.startswith(("model.", "optimizer.exp_avg")):
                tensor.add_(0.01)
        fresh = TrainStep(TinyLlama(SHAPE, tier, seed=9).to(device), step.config, StepPlan())
        stored.restore(fresh)
        weights = {name: t.clone() for name, t in fresh.model.state_dict().items()}
        expected = losses(fresh, 6, 7)
        stored.restore(step)
        assert losses(step, 6, 7) == pytest.approx(expected, rel=rel)
        step.model.load_state_dict(weights)
        assert losses(step, 6) == pytest.approx(expected[:1], rel=rel)


@pytest.mark.gpu
def test_step_with_values_that_a_graph_freezes_is_not_captured(device: torch.device) -> None:
    """The loss scale of fp16, and an optimizer that counts its steps on the host."""
    must_capture("v2", device)
    step = TrainStep(TinyLlama(SHAPE, "v2").to(device), TrainConfig(precision="fp16"))
    assert not step.plan.capture
    tier = TIERS["v2"].without("adamw")
    other = TrainStep(TinyLlama(SHAPE, tier).to(device), TrainConfig())
    assert not other.plan.capture
    assert "capture" in step.left_out.keys() & other.left_out.keys()
