"""A training run: it learns, it says what it did, and it does not hide what went wrong."""

import math
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from correctness_tests.support.faults import detached_norm_tier, tier_with
from correctness_tests.support.runs import CONFIG, MODEL, PARAMETERS, run
from correctness_tests.support.steps import slow_steps
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import TIERS
from tinyllama.ops import OPS
from tinyllama.training import checkpoint
from tinyllama.training.data import RandomTokens
from tinyllama.training.diagnose import gradients
from tinyllama.training.step import TrainStep
from tinyllama.training.train import StepRecord

# -- it says what it did ----------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("tier", TIERS)
def test_result_describes_run(tier: str, device: torch.device) -> None:
    records: list[StepRecord] = []
    steps = 1 if slow_steps(tier, device) else 4
    result = run(tier, device=device, on_step=records.append, num_steps=steps)
    assert result.status == "completed"
    assert result.reason is None
    assert len(result.losses) == len(result.step_seconds) == steps
    assert [record.number for record in records] == [*range(1, steps + 1)]
    assert [record.loss for record in records] == result.losses
    assert all(seconds > 0 for seconds in result.step_seconds)
    assert result.phase_seconds.keys() == {"forward", "backward", "optimizer"}
    assert all(seconds > 0 for seconds in result.phase_seconds.values())
    assert result.gradients == dict.fromkeys(PARAMETERS, True)
    assert result.parameters == MODEL.parameters
    assert result.samples_per_second is not None
    assert result.tokens_per_second == result.samples_per_second * CONFIG.seq_len
    assert {"python", "torch", "numpy", "tinyllama"} <= result.versions.keys()


@pytest.mark.long
def test_micro_batches_count_as_samples() -> None:
    """And draw the data of one batch of their size, so that the curve is the same."""
    at_once = run(batch_size=6)
    parts = replace(run(batch_size=2, accumulate=3), step_seconds=[0.5, 0.1, 0.1, 9.0, 0.2])
    assert parts.samples_per_second == 6 / 0.2
    assert parts.tokens_per_second == 6 * CONFIG.seq_len / 0.2
    assert parts.losses == pytest.approx(at_once.losses, rel=1e-5)


# -- gradients that get lost ------------------------------------------------------------------


def test_parameters_that_no_gradient_reaches_are_named(device: torch.device) -> None:
    with detached_norm_tier() as tier:
        result = run(tier, device=device)
    assert result.status == "failed"
    assert result.losses == []
    # What is left is the output projection, which is the embedding.
    assert result.lost == dict.fromkeys(PARAMETERS[1:], "absent")
    assert result.gradients == {name: name == "embedding" for name in PARAMETERS}
    assert result.reason == (
        f"no gradient arrives at {len(PARAMETERS) - 1} of {len(PARAMETERS)} parameters, "
        "and the optimizer updates all of them or none"
    )


@pytest.mark.long
def test_fp16_scale_that_starts_too_high_loses_no_gradient() -> None:
    step = TrainStep(TinyLlama(MODEL), replace(CONFIG, precision="fp16"))
    step.scaler.load_state_dict({**step.scaler.state_dict(), "scale": 2.0**40})
    verdicts = gradients(step, *RandomTokens(MODEL.vocab_size, CONFIG).batch(0))
    assert set(verdicts.values()) == {"received"}
    assert step.scaler.get_scale() == 2.0**40


# -- runs that end early ----------------------------------------------------------------------


@pytest.mark.long
def test_ctrl_c_within_a_step_waits_for_its_end(tmp_path: Path) -> None:
    """An update that stops half way would leave a state that no run ever had."""
    straight = run().losses
    calls: list[None] = []
    press_at = math.inf

    def press(*args: torch.Tensor, **params: Any) -> torch.Tensor:
        calls.append(None)
        if len(calls) == press_at:
            signal.raise_signal(signal.SIGINT)
        return OPS["linear_cross_entropy"]["torch"].call(*args, **params)

    with tier_with("linear_cross_entropy", press) as tier:
        run(tier)
        press_at = len(calls) - CONFIG.num_steps + 3  # in the third step, after the warm-up
        calls.clear()
        result = run(tier, save_to=tmp_path / "saved")
    assert result.status == "interrupted"
    assert result.losses == straight[:3]
    assert run(resume=checkpoint.load(tmp_path / "saved"), num_steps=1).losses == straight[3:]


def test_op_that_made_loss_not_finite_is_found() -> None:
    swiglu = OPS["swiglu"]["eager"]
    with tier_with("swiglu", lambda *args: swiglu(*args) / 0) as tier:
        result = run(tier)
    assert result.losses == []
    assert result.reason is not None
    assert result.reason.endswith("is layers.0.swiglu")
