"""Diagnosis: where in the model numbers grow, vanish or stop being numbers."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from correctness_tests.support.runs import CONFIG, MODEL, run
from tinyllama.harness.machine.device import cannot
from tinyllama.model.config import ModelConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import TIERS, StepPlan, Tier
from tinyllama.training.data import RandomTokens
from tinyllama.training.diagnose import Statistics, diagnose
from tinyllama.training.step import TrainStep

BATCH = RandomTokens(MODEL.vocab_size, CONFIG).batch(0)

OF_ROPE = ["qkv.q", "qkv.k", "qkv.v", "rope.q_rotated", "rope.k_rotated"]
OF_NORM = ["add_rms_norm.y", "add_rms_norm.sum"]
LAYER = ["rms_norm", *OF_ROPE, "attention", *OF_NORM, "swiglu"]
IN_ONE_PIECE = ["embedding", "layers.0", "layers.1", "final_norm", "logits", "loss"]
LAYERS = [[*(f"layers.{i}.{op}" for op in LAYER), f"layers.{i}"] for i in range(2)]
NAMES = ["embedding", *LAYERS[0], *LAYERS[1], "final_norm", "logits", "loss"]


def make_step(tier: str | Tier = "v1", model: ModelConfig = MODEL, **changes: Any) -> TrainStep:
    return TrainStep(TinyLlama(model, tier), replace(CONFIG, **changes))


def by_name(step: TrainStep) -> dict:
    return {op.name: op for op in diagnose(step, *BATCH, 1).ops}


# -- what is shown ----------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("tier", TIERS)
def test_diagnosis_has_every_op_of_every_layer_in_order(tier: str) -> None:
    ops = diagnose(make_step(tier), *BATCH, 1).ops
    assert [op.name for op in ops] == (IN_ONE_PIECE if "block" in TIERS[tier].table else NAMES)
    assert [op.name for op in ops if op.gradient is None] == ["logits"]


def test_diagnosis_shows_fp16_gradients_unscaled() -> None:
    step = make_step(precision="fp16")
    assert step.scaler.get_scale() > 1
    assert by_name(step)["loss"].gradient == Statistics(1.0, 1.0, 0.0, 0.0)
    plain = by_name(make_step())["layers.1"].gradient
    assert by_name(step)["layers.1"].gradient.std == pytest.approx(plain.std, rel=0.05)


# -- it changes nothing -----------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_diagnosed_run_has_same_curve(precision: str) -> None:
    plain = run(precision=precision).losses
    diagnosed = run(precision=precision, diagnosed=True)
    assert [diagnosis.step for diagnosis in diagnosed.diagnoses] == [1, 4]
    assert diagnosed.losses == plain
    assert [diagnosis.loss for diagnosis in diagnosed.diagnoses] == [plain[i] for i in (0, 3)]


def test_captured_run_goes_on_after_diagnosis(device: torch.device) -> None:
    """The graph's loss and gradients live in its own memory: they must be put back."""
    reason = cannot("capture", device)
    if reason:
        pytest.skip(f"capture: {reason}")
    plan = StepPlan(capture=True)
    plain = run("v2", device=device, plan=plan).losses
    diagnosed = run("v2", device=device, plan=plan, diagnosed=True).losses
    assert diagnosed == pytest.approx(plain, rel=1e-5)


# -- what it is for ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameter", "name"),
    [("embedding", "embedding"), ("layers.1.w_v", "layers.1.qkv.v"), ("final_norm", "final_norm")],
)
def test_diagnosis_names_first_op_that_is_not_finite(parameter: str, name: str) -> None:
    step = make_step()
    with torch.no_grad():
        step.model.get_parameter(parameter).fill_(math.nan)
    diagnosis = diagnose(step, *BATCH, 1)
    first = diagnosis.first_nonfinite
    assert first is not None
    assert first.name == name
    assert first.output.nonfinite == 1.0
