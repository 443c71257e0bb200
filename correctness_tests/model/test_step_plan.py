"""The plan of a step: a stack where it says so, and launches that depend on each other."""

import contextlib
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("triton")

from tinyllama.harness.kernels import layout
from tinyllama.harness.kernels.launch import recorded
from tinyllama.model import llama
from tinyllama.model.config import ModelConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import V4
from tinyllama.ops.stack.configs import FEW, pays
from tinyllama.training.step import products

SHAPE = ModelConfig(
    hidden_dim=16, num_layers=3, num_heads=2, num_kv_heads=1, ffn_dim=24, vocab_size=20
)
TOKENS = torch.randint(20, (2, 5), generator=torch.Generator().manual_seed(0))


# -- the plan -------------------------------------------------------------------------------------


def test_blocks_are_one_stack_where_the_plan_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def fused(value: bool) -> Iterator[None]:
        monkeypatch.setattr(llama, "pays", lambda x, dtype: value)
        yield

    model = TinyLlama(SHAPE, V4)
    model.stack = stack = Mock(wraps=model.stack)
    losses = []
    for value in (True, False):
        with fused(value):
            losses.append(model.loss(TOKENS[:, :-1], TOKENS[:, 1:]).item())
    stack.assert_called_once()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("tier", ["v1", "v2", "v3"])
def test_a_tier_without_a_stack_asks_for_no_plan(
    tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking one up reads a chip's table, which no compiler traces."""
    monkeypatch.setattr(llama, "pays", lambda x, dtype: pytest.fail("a plan was looked up"))
    with torch.no_grad():
        TinyLlama(SHAPE, tier).loss(TOKENS[:, :-1], TOKENS[:, 1:])


def test_the_plan_of_many_rows_is_the_vendors_products() -> None:
    few, many = (torch.empty(1, rows, 8, device="meta") for rows in (FEW, FEW + 1))
    assert pays(few, torch.bfloat16)
    assert not pays(many, torch.bfloat16)
    with products("fp32", torch.device("cpu")), recorded("sm_90"):
        assert not pays(few, torch.float32)  # three products of tf32: measured to lose


def test_parameters_of_the_layers_are_one_view() -> None:
    model, before = TinyLlama(SHAPE, V4), layout.copies
    for name, parameter in model.layers[1].named_parameters():
        together = layout.stacked([getattr(layer, name) for layer in model.layers])
        assert together.shape == (3, *parameter.shape)
        assert together[1].data_ptr() == parameter.data_ptr()
    assert layout.copies == before
    apart = layout.stacked([torch.zeros(2), torch.ones(2), torch.full((2,), 2.0)])
    assert apart.tolist() == [[0, 0], [1, 1], [2, 2]]
    assert layout.copies == before + 1
