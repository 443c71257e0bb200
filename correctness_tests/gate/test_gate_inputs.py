"""What a timed call is given and asked for, what it must leave alone, and what it keeps."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from correctness_tests.support.contenders import weighed
from correctness_tests.support.gate_subjects import Make, Turning, nudged, ready
from tinyllama.harness.correct.evaluate import Inputs
from tinyllama.harness.gate import accepted
from tinyllama.harness.gate import subject as module
from tinyllama.harness.gate.exact import COUNTED_ON_GPU
from tinyllama.harness.gate.subject import Subject
from tinyllama.harness.measure.launches import Launches
from tinyllama.harness.measure.op_contender import WrongResultError


def test_a_call_that_spoils_the_gradient_it_is_given_is_wrong(subject: Make) -> None:
    class Spoils(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
            return y.clone()

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
            given = dy.clone()
            dy.zero_()
            return given

    made = subject(lambda x, weight: Spoils.apply(weighed(x, weight)))
    with pytest.raises(WrongResultError, match="changed the upstream gradient of y"):
        made.verify()


def test_what_a_first_call_keeps_is_counted(subject: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer that stays is in no later call's peak."""
    allocated = [100]
    kept: list[int] = []

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if not kept:
            kept.append(0)
            allocated[0] += 70
        return weighed(x, weight)

    monkeypatch.setattr(Subject, "_allocated", lambda self: allocated[0])
    made = subject(call)
    assert made.kept_bytes == 70
    made.run_once()
    assert made.kept_bytes == 0


def test_what_is_given_and_asked_for_is_in_the_digest_of_inputs(
    subject: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(change: Callable[[Inputs], dict[str, Any]] = lambda inputs: {}, **how: Any) -> int:
        made = subject(**how)
        drawn = made._drawn
        monkeypatch.setattr(made, "_drawn", lambda: replace(drawn(), **change(drawn())))
        return made.input_digest()

    assert changed() == changed()
    made = subject()
    fewer = {name: replace(tensor, grad=False) for name, tensor in made.op.inputs.items()}
    found = [
        changed(),
        changed(case=1),
        changed(dtype="bf16"),
        changed(lambda inputs: {"params": {"eps": 7.0}}),
        changed(lambda inputs: {"args": {f"{name}_": x for name, x in inputs.args.items()}}),
        changed(lambda inputs: {"args": {**inputs.args, "x": 2 * inputs.args["x"]}}),
        changed(lambda inputs: {"args": {**inputs.args, "weight": 2 * inputs.args["weight"]}}),
        changed(lambda inputs: {"args": {**inputs.args, "x": inputs.args["x"].flatten()}}),
        changed(lambda inputs: {"upstream": {"y": inputs.args["x"]}}),
    ]
    monkeypatch.setattr(made.op, "inputs", fewer)
    found.append(made.input_digest())  # results that nobody asks for any more
    assert len(set(found)) == len(found)


def test_what_is_compared_exactly_of_a_call_on_a_gpu(
    subject: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = subject()
    found = Launches(kernels=3, copies=1, host_syncs=0, busy_seconds=1e-5, time_by={})
    monkeypatch.setattr(module, "launches", lambda call, device: found)
    for name, answer in (("_calibrate", None), ("_prepare", None), ("_peak", 70)):
        monkeypatch.setattr(made, name, lambda *args, answer=answer: answer)
    made.kept_bytes = 5
    made.device = torch.device("cuda")
    counted = {"peak_bytes": 70, "kept_bytes": 5, "kernels": 3, "copies": 1, "host_syncs": 0}
    assert made.counted() == counted
    assert counted.keys() >= set(COUNTED_ON_GPU)
    assert set(accepted.COUNTED) == counted.keys(), "each may be accepted by number"


def test_a_call_on_another_layout_is_near_what_was_verified(subject: Make) -> None:
    """And gives all of it; its bits may be others."""
    call = Turning(nudged)
    made = ready(subject(call))
    assert made.exact
    call.turned = True
    made._one_call(0)
    made._check()
    call.wrong = lambda x, weight: 1.02 * weighed(x, weight)
    made._one_call(0)
    with pytest.raises(WrongResultError, match=r"y of a timed call: .* from what was verified"):
        made._check()
    call.turned = False
    made._one_call(0)
    made.gradients = ()
    with pytest.raises(WrongResultError, match="a timed call gave no grad"):
        made._check()
