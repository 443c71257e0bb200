"""The optimizer's parts, and the layout of the model that it updates, on small tensors."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from correctness_tests.support.two_ranks import SHAPE
from tinyllama.model import llama, optim
from tinyllama.model.config import ModelConfig, TrainConfig
from tinyllama.model.llama import ALIGNMENT, TinyLlama
from tinyllama.model.optim import AdamW, EarlyUpdate, counted_apart
from tinyllama.model.tiers import V4
from tinyllama.training.step import update_groups

CONFIG = TrainConfig(learning_rate=0.05, beta1=0.7, beta2=0.8, eps=1e-3, weight_decay=0.3)
PROVIDERS = ("eager", "torch", "default", "triton")
CPU = torch.device("cpu")


def parameters(count: int = 3) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.linspace(-1, 1 + n, 4 + n)) for n in range(count)]


def give(some: Sequence[torch.Tensor], step: int = 0) -> None:
    for number, parameter in enumerate(some):
        parameter.grad = torch.linspace(-2 + number, 1 + step, parameter.numel())


@pytest.mark.parametrize("provider", PROVIDERS)
def test_every_setting_is_that_of_torch(provider: str) -> None:
    mine, theirs = parameters(), parameters()
    optimizer = AdamW(mine, CONFIG, provider)
    expected = torch.optim.AdamW(
        theirs, lr=0.05, betas=(0.7, 0.8), eps=1e-3, weight_decay=0.3, foreach=False
    )
    for step, rate in enumerate((0.05, 0.05, 0.02)):
        optimizer.set_lr(rate)
        expected.param_groups[0]["lr"] = rate
        for some in (mine, theirs):
            give(some, step)
        optimizer.step()
        expected.step()
    for got, want in zip(mine, theirs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert optimizer.steps.item() == 3
    state = optimizer.tensors()
    names = [f"{kind}.{n}" for kind in ("exp_avg", "exp_avg_sq") for n in range(3)]
    assert list(state) == [*names, "steps"]
    assert state["steps"] is optimizer.steps
    for n in range(3):
        for kind in ("exp_avg", "exp_avg_sq"):
            assert state[f"{kind}.{n}"] is getattr(optimizer, kind)[n]
            torch.testing.assert_close(state[f"{kind}.{n}"], expected.state[theirs[n]][kind])


@pytest.mark.parametrize("provider", PROVIDERS)
def test_where_a_number_is_not_finite_nothing_changes(provider: str) -> None:
    some = parameters()
    optimizer = AdamW(some, CONFIG, provider)
    give(some)
    optimizer.found_inf.fill_(1.0)
    before = [p.detach().clone() for p in some]
    optimizer.step()
    optimizer.update_part([0, 2])
    optimizer.count_step()
    assert all(torch.equal(p, b) for p, b in zip(some, before, strict=True))
    assert not any(tensor.any() for tensor in optimizer.tensors().values())
    optimizer.found_inf.zero_()
    optimizer.update_part([0, 2])
    assert [torch.equal(p, b) for p, b in zip(some, before, strict=True)] == [False, True, False]
    assert optimizer.steps.item() == 0
    optimizer.count_step()
    assert optimizer.steps.item() == 1


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_gradient_that_is_missing_is_refused(missing: int) -> None:
    some = parameters()
    give(some)
    some[missing].grad = None
    optimizer = AdamW(some, CONFIG)
    message = "1 of 3 parameters have no gradient: backward stops somewhere"
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    assert str(caught.value) == message
    optimizer.begin(torch.zeros(()))
    with pytest.raises(RuntimeError) as caught:
        optimizer.update_rest()
    assert str(caught.value) == message
    optimizer.refuse_missing(0)


@pytest.mark.parametrize("loss", [0.0, 3.0, -3.0, torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("provider", ["eager", "triton"])
def test_a_step_in_parts_is_counted_once_and_judged_by_its_loss(provider: str, loss: float) -> None:
    some = parameters()
    optimizer = AdamW(some, CONFIG, provider)
    good = loss in (0.0, 3.0, -3.0)
    for step in (1, 2):
        give(some)
        optimizer.begin(torch.tensor(loss))
        for index in (2, 0, 1):  # nothing is left for the rest
            optimizer.update_with({index: some[index].grad}, beside=index == 2)  # type: ignore[dict-item]
        optimizer.update_rest()
        assert optimizer.steps.item() == (step if good else 0)
        assert optimizer.found_inf.item() == (0 if good else 1)


def test_a_reset_optimizer_is_as_new() -> None:
    some = parameters()
    optimizer = AdamW(some, CONFIG)
    give(some)
    optimizer.step()
    optimizer.found_inf.fill_(1.0)
    places = [tensor.data_ptr() for tensor in optimizer.tensors().values()]
    optimizer.reset()
    assert not any(t.any() for t in (*optimizer.tensors().values(), optimizer.found_inf))
    assert [tensor.data_ptr() for tensor in optimizer.tensors().values()] == places


def test_one_tensor_stands_for_all_that_share_its_counter() -> None:
    first, apart, last = torch.zeros(4), torch.zeros(1), torch.zeros(2)
    found = counted_apart([first, first[1:], apart, first.detach(), last])
    assert len(found) == 3
    assert [any(one is each for one in found) for each in (first, apart, last)] == [True] * 3
    assert counted_apart([]) == []


# -- updates within the backward pass ----------------------------------------------------------


def test_a_group_is_updated_with_its_last_gradient_and_freed() -> None:
    a, b, c = some = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = AdamW(some, CONFIG)
    early = EarlyUpdate(optimizer, [[a, b], [c]])
    (a + b + c).sum().backward()
    assert all(p.grad is not None for p in some), "outside the context gradients stay"
    before = [p.detach().clone() for p in some]
    optimizer.zero_grad()
    with early.during(update=False):
        (a + b + c).sum().backward()
    assert all(p.grad is None for p in some)
    assert all(torch.equal(p, x) for p, x in zip(some, before, strict=True))
    with early.during(update=True):
        (a + c).sum().backward()
    assert [p.grad is None for p in some] == [False, True, True]
    moved = [not torch.equal(p, x) for p, x in zip(some, before, strict=True)]
    assert moved == [False, False, True], "a group is whole or not at all"
    with pytest.raises(RuntimeError, match="2 of 3 parameters have no gradient"):
        early.finish()
    assert optimizer.steps.item() == 0
    optimizer.zero_grad()
    with early.during(update=True):
        (a + b + c).sum().backward()
    early.finish()
    assert optimizer.steps.item() == 1
    assert not any(torch.equal(p, x) for p, x in zip(some, before, strict=True))


def test_groups_are_layers_and_each_other_parameter() -> None:
    model = TinyLlama(SHAPE)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [{names[id(p)] for p in group} for group in update_groups(model)]
    layers = [{n for n in names.values() if n.startswith(f"layers.{i}.")} for i in range(2)]
    assert groups == [*layers, {"embedding"}, {"final_norm"}]


# -- the model's memory ------------------------------------------------------------------------

ODD = ModelConfig(
    hidden_dim=20, num_layers=3, num_heads=2, num_kv_heads=1, ffn_dim=6, vocab_size=7, init_std=0.5
)


@pytest.mark.parametrize("tier", ["v1", V4])
def test_parameters_lie_in_one_memory_the_matrices_of_a_block_adjoin(tier: Any) -> None:
    model = TinyLlama(ODD, tier)
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    for changed in (model, model.double()):
        named = dict(changed.named_parameters())
        blocks = [[n for n in named if n.startswith(f"layers.{i}.w_")] for i in range(3)]
        groups = [*blocks, *([n] for n in named if ".w_" not in n)]
        at = 0
        for group in groups:
            for name in group:
                parameter = named[name]
                assert parameter.storage_offset() == at, name
                assert parameter.is_contiguous()
                assert torch.equal(parameter, values[name].to(parameter.dtype))
                at += parameter.numel()
            at = (at + 63) // 64 * 64
        size = model.embedding.untyped_storage().nbytes() // model.embedding.element_size()
        assert size == at
        assert len({p.untyped_storage().data_ptr() for p in named.values()}) == 1
    assert ALIGNMENT == 64


def test_a_model_is_initialised_anew_in_every_parameter() -> None:
    fresh, model = TinyLlama(ODD, seed=3), TinyLlama(ODD, seed=4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    model.initialise(3)
    for (name, got), want in zip(model.named_parameters(), fresh.parameters(), strict=True):
        assert torch.equal(got, want), name


def test_the_weights_of_a_seed_are_drawn_one_after_the_other() -> None:
    """The embedding first, then layer by layer: in another order, a seed is another model."""
    model, made = TinyLlama(ODD, seed=3), torch.Generator().manual_seed(3)
    drawn = ("w_q", "w_k", "w_v", "w_o", "w_gate", "w_up", "w_down")
    named = dict(model.named_parameters())
    layers = [f"layers.{n}.{name}" for n in range(ODD.num_layers) for name in drawn]
    for name in ("embedding", *layers):
        expected = torch.randn(named[name].shape, generator=made) * ODD.init_std
        assert torch.equal(named[name], expected), name


def test_tables_are_made_once_for_each_length() -> None:
    model = TinyLlama(replace(ODD, rope_theta=99.0))
    assert model.rope(5) is model.rope(5)
    assert model.rope(5) is not model.rope(6)
    assert not torch.equal(model.rope(5)[0], TinyLlama(ODD).rope(5)[0])
    assert [tuple(table.shape) for table in model.rope(5)] == [(5, 5)] * 2


def test_blocks_run_again_only_where_gradients_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    again = Mock(wraps=llama.checkpoint)
    monkeypatch.setattr(llama, "checkpoint", again)
    tokens = torch.arange(6).view(2, 3)
    model = TinyLlama(ODD)
    expected = model.loss(tokens, tokens)
    assert not again.called
    model.recompute = True
    assert torch.equal(model.loss(tokens, tokens), expected)
    assert [call.args[0] for call in again.call_args_list] == list(model.layers)
    with torch.no_grad():
        model.loss(tokens, tokens)
    assert again.call_count == 3
    assert model(tokens).shape == (2, 3, 7)


@pytest.mark.parametrize(
    ("plan", "pays", "settings", "one"),
    [
        ("fused", True, {}, True),
        ("fused", False, {}, False),
        ("single", False, {}, True),
        ("fused", True, {"recompute": True}, False),
        ("fused", True, {"in_one": False}, False),
    ],
)
def test_blocks_are_one_op_where_that_pays_or_was_asked_for(
    plan: str, pays: bool, settings: dict[str, bool], one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama, "pays", lambda x, dtype: pays)
    model = TinyLlama(ODD, V4.with_plan(plan))
    model.stack = stack = Mock(side_effect=lambda x, *rest, eps: x)
    for layer in model.layers:
        layer.compute = lambda x, *rest, eps: x  # type: ignore[assignment]
    for name, value in settings.items():
        setattr(model, name, value)
    tokens = torch.arange(6).view(2, 3)
    model.hidden(tokens, model.rope(3))
    assert [len(call.args) for call in stack.call_args_list] == ([1 + 2 + 9] if one else [])
    expected = plan == "single" or pays
    assert model.stacks(model.embedding, torch.float32) is expected
    assert TinyLlama(ODD, "v3").stacks(model.embedding, torch.float32) is False


@pytest.mark.parametrize(
    ("adamw", "stack", "blocks", "autocast", "asked"),
    [
        ("triton", "several", True, None, torch.float32),  # the dtype of the parameters
        ("triton", "several", True, torch.bfloat16, torch.bfloat16),
        ("triton", "single", True, None, None),  # its kernel reads no transposes
        ("eager", "several", True, None, None),
        ("triton", "several", False, None, None),
    ],
)
def test_transposes_are_offered_to_a_stack_of_several_kernels_that_our_optimizer_updates(
    adamw: str, stack: str, blocks: bool, autocast: torch.dtype | None, asked: torch.dtype | None
) -> None:
    model: Any = SimpleNamespace(
        tier=SimpleNamespace(table={"adamw": adamw, "stack": stack}),
        embedding=torch.ones(5, 3),
        stack=object() if blocks else None,
        stacks=Mock(return_value=False),
    )
    optimizer: Any = None
    assert optim.TransposedWeights.of(model, optimizer, 7, autocast) is None
    calls = [(tuple(call.args[0].shape), call.args[1]) for call in model.stacks.call_args_list]
    assert calls == ([((7, 3), asked)] if asked else [])
