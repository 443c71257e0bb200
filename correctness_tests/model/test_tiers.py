"""Tiers compute the same thing: twenty steps of training."""

import math
from dataclasses import replace

import pytest
import torch

from correctness_tests.support.steps import (
    BATCH,
    SHAPE,
    leave_to_gpu,
    must_capture,
    run,
    slow_steps,
    tokens,
)
from tinyllama.harness.machine.device import cannot
from tinyllama.model.config import ConfigError, TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import TIERS, V2, StepPlan, Tier
from tinyllama.ops import OPS
from tinyllama.training.diagnose import diagnose, gradients
from tinyllama.training.step import TrainStep, products

OTHERS = [name for name in TIERS if name != "v1"]
STEPS = 20
CONFIG = TrainConfig(**BATCH)
SMALL = StepPlan(memory="small")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("tier", OTHERS)
def test_training_of_tiers_agrees(
    tier: str, precision: str, device: torch.device, seed: int
) -> None:
    """Losses and parameters after twenty steps, held to what the learning changed."""
    steps = 3 if slow_steps(tier, device) else STEPS
    expected = run("v1", device, steps=steps, precision=precision, seed=seed)
    got = run(tier, device, steps=steps, precision=precision, seed=seed)
    allowed = {"fp32": 1e-5, "bf16": 5e-3}[precision]
    assert got.losses == pytest.approx(expected.losses, rel=allowed)
    initial = dict(TinyLlama(SHAPE, seed=seed).to(device).named_parameters())
    for name, start in initial.items():
        moved = (expected.params[name] - start).norm()
        error = (expected.params[name] - got.params[name]).norm()
        assert moved > 0, f"{name} did not learn"
        # Adam divides by the gradient's own size, so rounding shows most where it is small.
        assert error <= {"fp32": 0.02, "bf16": 0.25}[precision] * moved, name


@pytest.mark.parametrize(
    "plan",
    [None, SMALL, pytest.param(replace(SMALL, capture=True), marks=pytest.mark.gpu)],
    ids=str,
)
@pytest.mark.parametrize("tier", TIERS)
def test_loss_that_is_not_finite_changes_nothing(
    tier: str, plan: StepPlan | None, device: torch.device
) -> None:
    """In small memory it must be known before the first parameter is updated."""
    leave_to_gpu(tier, device)
    if plan and plan.capture:
        must_capture(tier, device)
    model = TinyLlama(SHAPE, tier).to(device)
    with products("fp32", device):
        step = TrainStep(model, CONFIG, plan)
        step.prepare()
        batch = tokens(0).to(device)
        step(batch[:, :-1], batch[:, 1:])
        with torch.no_grad():
            model.final_norm[0] = math.inf
        tensors = [*model.parameters(), *step.optimizer.tensors().values()]
        before = [tensor.detach().clone() for tensor in tensors]
        assert not step(batch[:, :-1], batch[:, 1:]).isfinite()
        assert all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))
        with torch.no_grad():
            model.final_norm[0] = 1.0
        assert step(batch[:, :-1], batch[:, 1:]).isfinite()
        assert step.optimizer.steps.item() == 2


@pytest.mark.parametrize("tier", TIERS)
def test_same_seed_gives_same_run(tier: str, device: torch.device) -> None:
    """Bit for bit, where every provider of the tier declares itself deterministic."""
    leave_to_gpu(tier, device)
    nondeterministic = [
        f"{op}-{provider}"
        for op, provider in TIERS[tier].table.items()
        if device.type not in OPS[op][provider].deterministic
    ]
    if nondeterministic:
        pytest.skip(f"declared not deterministic on {device.type}: {', '.join(nondeterministic)}")
    first, second = (run(tier, device, steps=3) for _ in range(2))
    assert first.losses == second.losses
    assert all(torch.equal(first.params[name], second.params[name]) for name in first.params)
    assert run(tier, device, steps=3, seed=1).losses != first.losses


@pytest.mark.parametrize("plan", [None, SMALL], ids=str)
@pytest.mark.parametrize("tier", TIERS)
def test_preparation_and_diagnosis_leave_no_trace(
    tier: str, plan: StepPlan | None, device: torch.device
) -> None:
    leave_to_gpu(tier, device)
    model = TinyLlama(SHAPE, tier).to(device)
    batch = tokens(0).to(device)
    with products("fp32", device):
        step = TrainStep(model, CONFIG, plan)
        tensors = [*model.parameters(), *step.optimizer.tensors().values()]
        before = [tensor.detach().clone() for tensor in tensors]
        phases = step.split()
        step.prepare()
        gradients(step, batch[:, :-1], batch[:, 1:])
        diagnose(step, batch[:, :-1], batch[:, 1:], 1)
    assert set(phases) == {"forward", "backward", "optimizer"}
    assert all(seconds > 0 for seconds in phases.values())
    assert all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize("switch", V2.switches)
def test_v2_without_a_part_trains_as_v1(switch: str, device: torch.device) -> None:
    losses = run(V2.without(switch), device, plan=StepPlan()).losses
    assert losses == pytest.approx(run("v1", device).losses, rel=1e-6)


def test_plan_that_cannot_run_is_refused(device: torch.device) -> None:
    if cannot("capture", device) is None:
        pytest.skip("this device can capture: there is no plan to refuse")
    model = TinyLlama(SHAPE, Tier("t", "t", V2.table, cpu=StepPlan(capture=True)))
    with pytest.raises(ConfigError, match="capture cannot run on cpu: device graphs need a GPU"):
        TrainStep(model, TrainConfig(), StepPlan(capture=True))
    assert TrainStep(model, TrainConfig()).left_out == {"capture": "device graphs need a GPU"}
