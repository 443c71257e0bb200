"""Training steps that the gate times: every gradient of one is held to float64, and each loss to
that of the verified run."""

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch

from tinyllama.bench import gated as module
from tinyllama.bench.gated import StepSubject, TimedStep, Verified, benchmarks
from tinyllama.harness.gate.benchmarks import Registered
from tinyllama.harness.gate.metric import ALL_WORK, DEVICE
from tinyllama.harness.gate.worker import Side
from tinyllama.harness.measure.right_results import WrongResultError

CPU = torch.device("cpu")
TIMED = TimedStep("v1", "tiny-fp32")
NAME = "step-v1-tiny-fp32/forward+backward+update"
SETTINGS = {"weight_decay": 1.0, "beta1": 0.8, "beta2": 0.99, "eps": 1e-4}  # none of the defaults


@pytest.fixture(scope="module")
def proven_once() -> Verified:
    """A verified run of some steps."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "VERIFIED", 32)
        verified = StepSubject(TIMED, "cpu").verify(0)
    torch.set_num_threads(threads)
    return verified


@pytest.fixture
def proven(proven_once: Verified, monkeypatch: pytest.MonkeyPatch) -> Iterator[Verified]:
    """The same; others take as many steps, in one thread too."""
    monkeypatch.setattr(module, "VERIFIED", 32)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield proven_once
    torch.set_num_threads(threads)


def started() -> StepSubject:
    subject = StepSubject(TIMED, "cpu")
    subject.run_once()
    return subject


def test_a_cpu_times_one_step_beside_the_ops() -> None:
    (benchmark,) = benchmarks(CPU)
    assert (benchmark.name, benchmark.timed, benchmark.slowdowns) == (NAME, TIMED, {}), (
        "the usual ones"
    )
    side = Side("cpu", Registered("tinyllama.ops", factory=f"{benchmarks.__module__}:benchmarks"))
    assert NAME in [benchmark.name for benchmark in side.benchmarks()]


@pytest.mark.long
def test_a_right_step_has_the_losses_of_the_verified_run_and_gives_times(proven: Verified) -> None:
    assert len(proven.losses) == module.VERIFIED
    subject = started()
    subject.expect(proven)
    for _ in range(2):
        assert 0 < subject.gated_turn(0)[DEVICE] < 60
    assert subject.step.loss_series() == pytest.approx(
        proven.losses[: len(subject.step.losses)], rel=1e-6
    )


@pytest.mark.long
def test_runs_begin_with_the_same_batches_and_the_same_model() -> None:
    subject = started()
    assert subject.input_digest() == started().input_digest()
    changed = started()
    changed.step.batches = changed.step.batches.flip(0)
    assert subject.input_digest() != changed.input_digest()
    for attribute, changes in (("shape", {"num_kv_heads": 4}), ("config", {"accumulate": 2})):
        changed = started()
        setattr(changed.step, attribute, replace(getattr(changed.step, attribute), **changes))
        assert subject.input_digest() != changed.input_digest(), changes
    smaller = started()
    left = {name: p for name, p in smaller.step.parameters.items() if name != "layers.1.w_q"}
    smaller.step.parameters = left
    assert subject.input_digest() != smaller.input_digest()


@pytest.mark.long
@pytest.mark.parametrize("wrong", ["none", "one left out", "counted twice", "lr", *SETTINGS])
def test_a_step_whose_update_is_not_adamw_is_no_proof(
    monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    """Its gradients are right, and its losses are those of any run of the same code."""
    monkeypatch.setattr(module, "VERIFIED", 4)
    subject = started()
    subject._check_update()
    optimizer = subject.step.training.optimizer
    step = type(optimizer).step

    @torch.no_grad()
    def wrongly(self: Any, closure: Any = None) -> None:
        if wrong == "one left out":
            parameters = self.parameters
            self.begin(torch.zeros(()))
            self.update_with({i: p.grad for i, p in enumerate(parameters) if i})
            self.end()
        elif wrong == "counted twice":
            step(self)
            self.steps.add_(1)

    if wrong in SETTINGS:
        optimizer.settings[wrong] = SETTINGS[wrong]
    elif wrong == "lr":
        optimizer.set_lr(1.05 * float(optimizer.lr))
    else:
        monkeypatch.setattr(type(optimizer), "step", wrongly)
    with pytest.raises(WrongResultError, match=r"is not AdamW's|steps are counted"):
        subject.verify(0)


@pytest.mark.long
def test_a_wrong_gradient_is_found_by_what_the_verified_run_was_allowed(proven: Verified) -> None:
    assert len(proven.allowed) == len(started().step.parameters)
    for name in ("embedding", "layers.0.w_q"):
        subject = started()
        subject.step.parameters[name].register_hook(lambda gradient: 1.01 * gradient)
        with pytest.raises(WrongResultError, match=f"1 of .* no right gradient: {name}"):
            subject.expect(proven)


@pytest.mark.long
@pytest.mark.parametrize(
    ("place", "wrong"),
    list(zip(range(1 + module.CALLS), cycle([1.05, 0.95, math.nan]), strict=False)),
)
def test_every_step_of_a_turn_is_held_to_the_verified_run(
    proven: Verified, place: int, wrong: float
) -> None:
    subject = started()
    subject.expect(proven)
    losses = list(proven.losses)
    losses[len(subject.step.losses) + place] *= wrong
    subject.losses = losses
    with pytest.raises(WrongResultError, match=r"the loss is .*, verified was"):
        subject.gated_turn(0)


@pytest.mark.long
def test_all_work_of_a_turn_is_of_all_its_steps(proven: Verified) -> None:
    subject = started()
    subject.expect(proven)
    step_call, slow = subject._call, iter([0.5, 0.0])

    def call() -> None:
        time.sleep(next(slow, 0.0))
        step_call()

    subject._call = call  # type: ignore[method-assign]
    turn = subject.gated_turn(0)
    assert turn[ALL_WORK + DEVICE] >= 0.5 / (1 + module.CALLS)
    assert turn[DEVICE] < 0.5
