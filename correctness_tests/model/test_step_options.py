"""Clipping and accumulation: the same training as a loop in plain torch, captured or not.

Adam divides by the gradient's size, so parameters hardly show a gradient that is too large by
a factor: the gradients themselves are compared.
"""

import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from correctness_tests.support import runs
from correctness_tests.support.faults import infinite_gradient_tier
from correctness_tests.support.steps import (
    BATCH,
    RATES,
    SHAPE,
    Run,
    assert_same_training,
    must_capture,
    run,
    slow_steps,
    tokens,
)
from tinyllama.model.config import TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import TIERS, V2, StepPlan
from tinyllama.training.data import RandomTokens
from tinyllama.training.diagnose import diagnose, gradients
from tinyllama.training.step import TrainStep, products

CPU = torch.device("cpu")
LIMIT = 0.5  # norms are 1.5 to 1.8 here
OPTIONS = [
    pytest.param({"max_grad_norm": LIMIT}, id="clipped"),
    pytest.param({"accumulate": 3}, id="accumulated"),
    pytest.param({"max_grad_norm": LIMIT, "accumulate": 2}, id="both"),
]


def by_hand(
    device: torch.device, *, steps: int, max_grad_norm: float = math.inf, accumulate: int = 1
) -> Run:
    """Nothing of the step: V1's logits, and torch's loss, optimizer and clipping."""
    model = TinyLlama(SHAPE, "v1").to(device)
    settings = TrainConfig()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    losses, norms = [], []
    with products("fp32", device):
        for index in range(steps):
            optimizer.param_groups[0]["lr"] = RATES[index]
            optimizer.zero_grad()
            total = 0.0
            for batch in tokens(index, accumulate=accumulate).to(device).split(BATCH["batch_size"]):
                logits = model(batch[:, :-1]).flatten(0, 1)
                loss = F.cross_entropy(logits, batch[:, 1:].flatten()) / accumulate
                loss.backward()
                total += loss.item()
            losses.append(total)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
            norms.append(norm.item())
            optimizer.step()
    named = dict(model.named_parameters())
    grads = {name: p.grad for name, p in named.items() if p.grad is not None}
    return Run(losses, grads, {name: p.detach() for name, p in named.items()}, norms)


@pytest.mark.long
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("tier", TIERS)
def test_step_is_that_of_loop_in_torch(
    tier: str, options: dict[str, Any], device: torch.device
) -> None:
    steps = 4
    if slow_steps(tier, device):
        steps = 2
        if len(options) < 2:
            pytest.skip("interpreted kernels take seconds a step: both options at once show it")
    expected = by_hand(device, steps=steps, **options)
    assert min(expected.norms) > LIMIT
    got = run(tier, device, steps=steps, plan=StepPlan(), rates=RATES, **options)
    assert_same_training(got, expected, 1e-6 if device.type == "cpu" else 1e-5)


@pytest.mark.parametrize("capture", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_norm_that_is_not_finite_changes_nothing(capture: bool, device: torch.device) -> None:
    """It would scale every gradient that is finite to zero, and pass for a step."""
    with infinite_gradient_tier() as tier:
        if capture:
            must_capture("v2", device)
            tier = replace(V2, table={**V2.table, "swiglu": tier.table["swiglu"]})
        model = TinyLlama(SHAPE, tier).to(device)
        with products("fp32", device):
            config = TrainConfig(**BATCH, max_grad_norm=LIMIT)
            step = TrainStep(model, config, StepPlan(capture=capture))
            step.prepare()
            before = [p.detach().clone() for p in model.parameters()]
            batch = tokens(0).to(device)
            assert step(batch[:, :-1], batch[:, 1:]).isfinite()
        assert step.norm is not None
        assert not step.norm.isfinite()
        assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        assert not any(tensor.any() for tensor in step.optimizer.tensors().values())


def test_norm_that_is_not_finite_ends_run_and_names_op(device: torch.device) -> None:
    with infinite_gradient_tier() as tier:
        result = runs.run(tier, device=device, max_grad_norm=1.0)
    assert result.status == "failed"
    assert result.losses == []
    assert result.reason is not None
    assert re.fullmatch(
        "the gradients' norm of step 1 is (inf|nan): "
        r"the last op whose output's gradient is not finite is layers\.1\.swiglu",
        result.reason,
    )


@pytest.mark.long
@pytest.mark.parametrize("accumulate", [1, 2])
def test_fp16_gradients_are_unscaled_before_they_are_clipped(
    accumulate: int, device: torch.device
) -> None:
    options: dict[str, Any] = {"steps": 3, "accumulate": accumulate, "max_grad_norm": LIMIT}
    options["plan"] = StepPlan()
    expected = run("v1", device, **options)
    got = run("v1", device, precision="fp16", **options)
    assert got.norms == pytest.approx(expected.norms, rel=0.01)
    for name, gradient in expected.grads.items():
        assert (got.grads[name] - gradient).norm() <= 0.05 * gradient.norm(), name


@pytest.mark.long
def test_fp16_goes_on_when_its_scale_overflows(device: torch.device) -> None:
    """The scaler skips such a step and lowers the scale; that is no failure."""
    step = TrainStep(
        TinyLlama(SHAPE).to(device), TrainConfig(**BATCH, precision="fp16", max_grad_norm=LIMIT)
    )
    step.scaler.load_state_dict({**step.scaler.state_dict(), "scale": 2.0**40})
    batch = tokens(0).to(device)
    norms = []
    for _ in range(40):
        step(batch[:, :-1], batch[:, 1:])
        assert step.norm is not None
        norms.append(step.norm.item())
    skipped = sum(not math.isfinite(norm) for norm in norms)
    assert 0 < skipped < len(norms)
    assert step.optimizer.steps.item() == len(norms) - skipped
    assert all(parameter.isfinite().all() for parameter in step.model.parameters())


@pytest.mark.long
def test_norm_that_fp16_overflows_does_not_end_run(device: torch.device) -> None:
    with infinite_gradient_tier() as tier:
        result = runs.run(tier, device=device, precision="fp16", max_grad_norm=1.0)
    assert result.status == "completed"
    assert result.gradient_norms == [None] * 4
    json.dumps(result.as_dict(), allow_nan=False)


@pytest.mark.parametrize("sick", [0, 1])
def test_diagnosis_finds_fault_in_any_micro_batch(sick: int) -> None:
    config = replace(runs.CONFIG, accumulate=2)
    model = TinyLlama(runs.MODEL)
    step = TrainStep(model, config)
    batch = RandomTokens(runs.MODEL.vocab_size, config).batch(0)
    norm = model.norm
    calls: list[None] = []

    def norm_with_a_fault(*args: Any, **params: Any) -> torch.Tensor:
        calls.append(None)
        return norm(*args, **params) * (math.nan if len(calls) - 1 == sick else 1)

    model.norm = norm_with_a_fault
    diagnosis = diagnose(step, *batch, 1)
    assert diagnosis.first_nonfinite is not None
    assert diagnosis.first_nonfinite.name == "final_norm"
    assert [op.name for op in diagnosis.ops].count("loss") == 1
    calls.clear()
    assert gradients(step, *batch)["final_norm"] == "not finite"
