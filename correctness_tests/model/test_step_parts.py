"""Parts of a step, each by itself: what is compiled, its batch, its phases, its preparation.

What several ranks do is stood in for; nothing is compiled or captured.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from unittest.mock import call as called

import pytest
import torch

from correctness_tests.support.runs import CONFIG, MODEL
from correctness_tests.support.two_ranks import SHAPE
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import StepPlan
from tinyllama.training import compiled, step
from tinyllama.training.compiled import _ByParts
from tinyllama.training.data import RandomTokens
from tinyllama.training.ranks import ALONE, Ranks
from tinyllama.training.step import TrainStep

TWO = Ranks(0, 2)


# -- compiled by parts -------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is compiled, in order; compiled it notes that it was called."""
    found: list[Any] = []

    def compile_(function: Any) -> Any:
        def noted(*args: Any, **params: Any) -> Any:
            import torch._dynamo.config as dynamo

            found.append(("called", function, dynamo.optimize_ddp))
            return function(*args, **params)

        found.append(function)
        return noted

    monkeypatch.setattr(compiled, "_compile", compile_)
    return found


def test_one_rank_compiles_one_graph(made: list[Any]) -> None:
    model = TinyLlama(SHAPE)
    compiled.compiled(model, ALONE)
    assert made == [model.loss_with]


def test_several_ranks_compile_block_norm_and_loss(made: list[Any]) -> None:
    model = TinyLlama(SHAPE)
    layers: list[Any] = list(model.layers)
    plain = (layers[0].compute, model.norm, model.loss_of)
    loss_of = compiled.compiled(model, TWO)
    assert isinstance(loss_of, _ByParts)
    assert made == list(plain)
    made.clear()
    tokens = torch.arange(8).view(2, 4)
    expected = model.loss(tokens, tokens)
    assert torch.equal(loss_of(tokens, tokens, model.rope(4)), expected)
    block, norm, loss = plain
    order = [block] * len(layers) + [norm, loss]
    assert made == [("called", function, False) for function in order]
    with pytest.raises(IndexError):
        loss_of(tokens + 100, tokens, model.rope(4))
    assert (model.norm, model.loss_of) == (norm, loss)
    assert all(layer.compute is block for layer in layers)


# -- what a step does --------------------------------------------------------------------------


def a_step(**settings: Any) -> TrainStep:
    plan = settings.pop("plan", None)
    return TrainStep(TinyLlama(MODEL), replace(CONFIG, **settings), plan)


def test_a_batch_that_does_not_fit_is_refused_by_its_own_shape() -> None:
    one = a_step()
    right, wrong = torch.zeros(2, 8, dtype=torch.int64), torch.zeros(2, 9, dtype=torch.int64)
    for tokens, targets in ((wrong, right), (right, wrong), (wrong, wrong)):
        with pytest.raises(ValueError, match="shape") as caught:
            one(tokens, targets)
        assert str(caught.value) == "a batch of shape (2, 9): this step takes (2, 8)"
    with pytest.raises(ValueError, match="shape") as caught:
        one(right)
    assert str(caught.value) == (
        "windows of shape (2, 8): this step takes (2, 9), or tokens and targets (2, 8)"
    )


@pytest.mark.parametrize("accumulate", [1, 3])
def test_windows_are_tokens_and_their_successors(accumulate: int) -> None:
    config = replace(CONFIG, accumulate=accumulate)
    tokens, targets = RandomTokens(MODEL.vocab_size, config).batch(0)
    windows = torch.cat([tokens, targets[:, -1:]], 1)
    for given in (windows, windows.T.contiguous().T):
        one, other = a_step(accumulate=accumulate), a_step(accumulate=accumulate)
        assert one(given).item() == other(tokens, targets).item()
        assert torch.equal(torch.cat(list(one.tokens)), tokens)
        assert torch.equal(torch.cat(list(one.targets)), targets)


def test_phases_are_those_of_each_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    one = a_step(accumulate=3)
    names = [name for name, _ in one._phases()]
    assert names == ["forward", "backward"] * 3 + ["optimizer"]
    seconds = iter([float(n) for n in range(1, 100)])
    queue: Any = object()
    asked: list[Any] = []

    def wall(phase: Any, of: Any) -> float:
        asked.append(of)
        phase()
        return next(seconds)

    monkeypatch.setattr(step, "wall_seconds", wall)
    found = one.split(2, queue)
    # 1 + 3 + 5, then 8 + 10 + 12; 2 + 4 + 6, then 9 + 11 + 13; 7, then 14
    assert found == {"forward": 19.5, "backward": 22.5, "optimizer": 10.5}
    assert set(asked) == {queue}


def test_copies_of_weights_are_renewed_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A weight may have been changed by hand since the last step."""
    one = a_step()
    batch = RandomTokens(MODEL.vocab_size, CONFIG).batch(0)
    told: list[str] = []
    forward = one._forward

    def noted(part: int) -> None:
        told.append("forward")
        forward(part)

    monkeypatch.setattr(one, "_forward", noted)
    copies: Any = SimpleNamespace(refresh=lambda: told.append("renewed"), offered=nullcontext)
    one.rounded = copies
    calls: list[Any] = [
        lambda: one(*batch),
        lambda: one.probe(*batch),
        lambda: one.prepare(warm_up=1),
        lambda: one.split(1),
    ]
    for call in calls:
        told.clear()
        call()
        assert told[:2] == ["renewed", "forward"]
        assert told.count("renewed") == 1


@pytest.mark.parametrize(
    ("number", "stops"), [(3e38, 0), (math.nan, 1), (math.inf, 1), (-math.inf, 1)]
)
def test_an_update_is_stopped_by_any_number_that_is_not_finite(number: float, stops: int) -> None:
    step = a_step()
    step._judge(torch.tensor(number))
    step._guard()
    assert step.optimizer.found_inf.item() == stops


def test_a_loss_that_was_not_finite_while_state_is_preserved_stops_no_update() -> None:
    """Warm-up runs on whatever the buffers hold."""
    one = a_step()
    before = one.optimizer.parameters[0].detach().clone()
    with one.preserved():
        one.optimizer.found_inf.fill_(1.0)
    for parameter in one.optimizer.parameters:
        parameter.grad = torch.ones_like(parameter)
    one.optimizer.step()
    assert not torch.equal(one.optimizer.parameters[0], before)


def test_a_step_runs_after_a_diagnosis_as_before() -> None:
    """Not uncompiled, and not block by block."""
    one = a_step()
    ways = one.model.in_one, one.model.recompute, one._reduction.plain
    batches = [RandomTokens(MODEL.vocab_size, CONFIG).batch(number) for number in (0, 1)]
    losses = [float(one.probe(*batch, compiled=way)) for way in (True, False) for batch in batches]
    assert (one.model.in_one, one.model.recompute, one._reduction.plain) == ways
    assert losses == pytest.approx([float(one(*batches[0])), losses[1]] * 2, rel=1e-6)
    assert losses[0] != pytest.approx(losses[1], rel=1e-4), "each is of its batch"


def test_a_gradient_scale_that_changed_while_state_is_preserved_is_put_back() -> None:
    """An overflow in the warm-up says nothing about the first step."""
    one = TrainStep(TinyLlama(SHAPE), replace(CONFIG, precision="fp16"))
    batch = RandomTokens(SHAPE.vocab_size, CONFIG).batch(0)
    scale = one.scaler.get_scale()
    with one.preserved():
        one(*batch)
        one.scaler.update(scale / 4)
        assert one.scaler.get_scale() == scale / 4
    assert one.scaler.get_scale() == scale


@pytest.mark.parametrize("count", [1, 2])
def test_phases_of_one_rank_alone_are_captured_one_by_one(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What several ranks begin beside one phase ends in the next."""
    one = a_step()
    one.plan, one.ranks = replace(one.plan, capture=True), Ranks(0, count)
    replayed: list[int] = []
    ran, phases = list[str](), ["forward", "backward", "optimizer"]
    noted = [(name, partial(ran.append, name)) for name in phases]
    monkeypatch.setattr(one, "_phases", lambda: noted)
    monkeypatch.setattr(one, "_side", SimpleNamespace(join=lambda: ran.append("joined")))

    def capture(*graphs: Any) -> list[Any]:
        for functions in graphs:
            for function in functions:
                function()
        numbers = range(len(graphs))
        return [SimpleNamespace(replay=lambda n=n: replayed.append(n)) for n in numbers]

    monkeypatch.setattr(step, "capture_graphs", capture)
    found = one.split(2)
    assert list(found) == phases
    assert replayed == ([0, 1, 2] * 2 if count == 1 else [])
    joined = [name for phase in phases for name in (phase, "joined")]
    assert ran == phases + (joined if count == 1 else phases * 2)


def test_preparation_warms_up_as_often_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    one = a_step()
    runs: list[int] = []

    def change() -> None:
        runs.append(1)
        with torch.no_grad():
            for tensor in (*one.optimizer.parameters, *one.optimizer.tensors().values()):
                tensor.add_(1)

    monkeypatch.setattr(one, "_run", change)
    tensors = [*one.optimizer.parameters, *one.optimizer.tensors().values()]
    kept = [tensor.detach().clone() for tensor in tensors]
    given: Any
    for given, count in (({}, 3), ({"warm_up": 1}, 1), ({"warm_up": 0}, 0)):
        runs.clear()
        one.prepare(**given)
        assert len(runs) == count
        assert all(map(torch.equal, kept, tensors))
    one.plan = replace(one.plan, capture=True)
    captured: list[Any] = []

    def capture(phases: Any) -> list[int]:
        captured.append(len(phases))
        return [1]

    monkeypatch.setattr(step, "capture_graphs", capture)
    monkeypatch.setattr(type(one._reduction), "warm_up", 11)
    for given, warm, graphs in (({}, 11, 1), ({"warm_up": 12}, 12, 1), ({"capture": False}, 11, 0)):
        runs.clear()
        captured.clear()
        one.prepare(**given)
        assert (len(runs), len(captured)) == (warm, graphs)
    one.prepare(warm_up=0)
    assert len(runs) == 11
    assert captured == [3]


@pytest.mark.parametrize(
    ("precision", "products"), [("tf32", "high"), ("fp32", "highest"), ("bf16", "highest")]
)
def test_products_have_the_precision_that_is_asked_for(
    precision: str, products: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "cannot", lambda capability, device: None)
    with step.products(precision, torch.device("cpu")):
        assert torch.get_float32_matmul_precision() == products
    monkeypatch.setattr(step, "cannot", lambda capability, device: f"no {capability}")
    with pytest.raises(step.ConfigError) as caught, step.products(precision, torch.device("cpu")):
        pass
    assert str(caught.value) == (
        f"precision {precision} is not there on cpu: no {precision}; use fp32 or bf16"
    )


def test_a_plan_without_capture_is_eager() -> None:
    assert str(a_step(plan=StepPlan()).plan) == "eager"


@pytest.mark.parametrize(("overlap", "early"), [(True, False), (True, True), (False, True)])
def test_a_step_is_counted_before_its_parts_are_updated(overlap: bool, early: bool) -> None:
    one: Any = a_step()
    parts = [{1: torch.ones(1)}, {0: torch.ones(1)}]
    told = Mock()
    told.reduction.early, told.reduction.arrive.return_value = early, parts
    one._reduction, one.optimizer, one._side = told.reduction, told.optimizer, told.side
    one.plan, one._counted, one._judged = replace(one.plan, overlap=overlap), 5, 6
    one._update()
    assert told.mock_calls == [
        called.side.wait(5) if overlap else called.optimizer.begin(6),
        called.reduction.arrive(),
        *(called.optimizer.update_with(part, beside=False) for part in parts),
        called.reduction.finish(),
        called.optimizer.update_rest(),
        called.side.join(),
    ]
