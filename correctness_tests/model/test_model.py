"""The model: shapes, parameters, initial loss, and that tokens see only their past."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tinyllama.model.config import PRESETS
from tinyllama.model.llama import TinyLlama

TINY = PRESETS["tiny"]


def test_every_matrix_is_drawn_by_itself_and_by_the_seed_and_gains_are_one() -> None:
    """A generator that starts anew gives every layer the same weights, and a loss that falls."""
    drawn: set[tuple[float, ...]] = set()
    for seed in (0, 1):
        model = TinyLlama(replace(TINY, init_std=0.5), seed=seed)
        matrices = [p for p in model.parameters() if p.dim() > 1]
        starts = {tuple(p.flatten()[:8].tolist()) for p in matrices}
        assert len(starts) == len(matrices) == 1 + 7 * TINY.num_layers
        assert not drawn & starts
        drawn |= starts
        assert all(p.std().item() == pytest.approx(0.5, rel=0.05) for p in matrices)
        assert all(p.eq(1).all() for p in model.parameters() if p.dim() == 1)
    again = TinyLlama(replace(TINY, init_std=0.5), seed=1)
    assert torch.equal(model.embedding, again.embedding)


@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode])
def test_model_learns_after_it_was_asked_without_gradients(first: Any) -> None:
    """What the first call keeps, the next one saves for its backward pass."""
    model, tokens = TinyLlama(TINY), torch.arange(8)[None]
    with first():
        model(tokens)
    model.loss(tokens, tokens).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_token_sees_only_its_past(device: torch.device) -> None:
    model = TinyLlama(TINY).double().to(device)
    tokens = torch.randint(1000, (1, 12), generator=torch.Generator().manual_seed(0)).to(device)
    changed = tokens.clone()
    changed[0, 7] = (tokens[0, 7] + 1) % 1000
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] - after[:, 7:]).norm(dim=-1).min() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rotary_tables_have_float32_or_wider(dtype: torch.dtype) -> None:
    tables = TinyLlama(PRESETS["tiny"]).to(dtype).rope(8)
    assert {table.dtype for table in tables} == {torch.promote_types(dtype, torch.float32)}
