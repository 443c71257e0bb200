"""A captured step follows all that changes between its replays: batch, rate, weights, state.

On a GPU by its graphs; elsewhere by recorded calls, which freeze what a graph freezes
(`correctness_tests.support.captured`).
"""

from typing import Any

import pytest
import torch

from correctness_tests.support.captured import record_graphs
from correctness_tests.support.steps import (
    BATCH,
    RATES,
    SHAPE,
    assert_equal_bits,
    assert_same_training,
    must_capture,
    run,
    slow_steps,
    tokens,
)
from tinyllama.harness.machine.device import cannot
from tinyllama.model.config import TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import TIERS, StepPlan
from tinyllama.training import checkpoint
from tinyllama.training.step import TrainStep, products

CAPTURED = [name for name, tier in TIERS.items() if not tier.counts_on_host]
LIMIT = 0.5


@pytest.fixture(autouse=True)
def graphs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded ones where the device has none."""
    if cannot("capture", device):
        record_graphs(monkeypatch)


def prepared(tier: str, device: torch.device, *, capture: bool, **settings: Any) -> TrainStep:
    model = TinyLlama(SHAPE, tier).to(device)
    step = TrainStep(model, TrainConfig(**BATCH, **settings), StepPlan(capture=capture))
    step.prepare(warm_up=0 if slow_steps(tier, device) else 3)
    assert bool(step.graphs) == capture
    return step


def losses(step: TrainStep, *numbers: int) -> list[float]:
    values = []
    for number in numbers:
        batch = tokens(number).to(step.device)
        values.append(step(batch[:, :-1], batch[:, 1:]).item())
    return values


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": LIMIT, "accumulate": 2}], ids=str)
@pytest.mark.parametrize("tier", CAPTURED)
def test_replay_follows_batches_and_rates(
    tier: str, options: dict[str, Any], precision: str, device: torch.device
) -> None:
    if slow_steps(tier, device) and (options or precision == "bf16"):
        pytest.skip("interpreted kernels take seconds a step: plain fp32 shows what is frozen")
    if device.type != "cpu":
        must_capture(tier, device)
    steps = 2 if slow_steps(tier, device) else 6
    settings: dict[str, Any] = {"steps": steps, "precision": precision, "rates": RATES, **options}
    expected = run(tier, device, plan=StepPlan(), **settings)
    got = run(tier, device, plan=StepPlan(capture=True), **settings)
    if device.type == "cpu":
        assert_equal_bits(got, expected)
    else:
        assert_same_training(got, expected, {"fp32": 1e-5, "bf16": 1e-4}[precision])


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("tier", CAPTURED)
def test_replay_follows_weights_and_state_that_are_loaded(
    tier: str, precision: str, device: torch.device, tmp_path: Any
) -> None:
    """By a checkpoint and by torch's own loading: a cast of the weights must not be kept."""
    if slow_steps(tier, device) and precision == "bf16":
        pytest.skip("interpreted kernels take seconds a step: plain fp32 shows what is frozen")
    path = tmp_path / "saved"
    options: dict[str, Any] = {"precision": precision, "seed": 1}
    with products(precision, device):
        step = prepared(tier, device, capture=True, **options)
        numbers = (6,) if slow_steps(tier, device) else (6, 7)
        checkpoint.save(path, step, 1, {"kind": "random tokens"})
        stored = checkpoint.load(path)
        for name, tensor in stored.tensors.items():  # those of another run
            if name.startswith(("model.", "optimizer.exp_avg")):
                tensor.add_(0.01)
        fresh = TrainStep(TinyLlama(SHAPE, tier, seed=9).to(device), step.config, StepPlan())
        stored.restore(fresh)
        weights = {name: t.clone() for name, t in fresh.model.state_dict().items()}
        expected = losses(fresh, *numbers)

        stored.restore(step)
        rel = 1e-6 if device.type == "cpu" else {"fp32": 1e-5, "bf16": 1e-4}[precision]
        assert losses(step, *numbers) == pytest.approx(expected, rel=rel)
        if slow_steps(tier, device):
            return
        step.model.load_state_dict(weights)
        assert losses(step, 6) == pytest.approx(expected[:1], rel=rel)


def test_step_with_values_that_a_graph_freezes_is_not_captured(device: torch.device) -> None:
    """The loss scale of fp16, and an optimizer that counts its steps on the host."""
    step = TrainStep(TinyLlama(SHAPE, "v2").to(device), TrainConfig(precision="fp16"))
    assert not step.plan.capture
    assert "gradient scaler" in step.left_out["capture"]
    step = TrainStep(TinyLlama(SHAPE, TIERS["v2"].without("adamw")).to(device), TrainConfig())
    assert not step.plan.capture
    assert "counts its steps on the host" in step.left_out["capture"]


def test_loss_that_is_not_finite_changes_nothing_in_replay(device: torch.device) -> None:
    with products("fp32", device):
        step = prepared("v2", device, capture=True)
        losses(step, 0)
        tensors = [*step.model.parameters(), *step.optimizer.tensors().values()]
        with torch.no_grad():
            step.model.final_norm[0] = torch.inf
        before = [tensor.detach().clone() for tensor in tensors]
        batch = tokens(1).to(device)
        assert not step(batch[:, :-1], batch[:, 1:]).isfinite()
        assert all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))
        with torch.no_grad():
            step.model.final_norm[0] = 1.0
        losses(step, 2)
        assert step.optimizer.steps.item() == 2
