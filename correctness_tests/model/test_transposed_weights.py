"""The transposes of weights that the optimizer keeps for a step in tf32."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.support.stacks import (  # noqa: F401 (fixtures)
    plans_forgotten,
    turn_fixture,
)
from tinyllama.model.config import ModelConfig, TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.optim import TransposedWeights
from tinyllama.model.tiers import V4
from tinyllama.ops.adamw import State, count, update, update_matrices
from tinyllama.training.step import TrainStep

SHAPE = ModelConfig(
    hidden_dim=16, num_layers=3, num_heads=2, num_kv_heads=1, ffn_dim=24, vocab_size=20
)
CONFIG = TrainConfig(batch_size=2, seq_len=4, precision="fp32", learning_rate=1e-2)
TOKENS = torch.randint(20, (2, 5), generator=torch.Generator().manual_seed(0))


def make_step(device: torch.device, plan: str = "all", **changes: Any) -> TrainStep:
    model = TinyLlama(SHAPE, V4.with_plan(plan)).to(device)
    step = TrainStep(model, replace(CONFIG, **changes))
    step.prepare(warm_up=1)
    return step


def train(step: TrainStep, steps: int = 3) -> list[float]:
    tokens = TOKENS.to(step.device)
    return [step(tokens).item() for _ in range(steps)]


def weights(step: TrainStep) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in step.model.parameters()]


def kept(step: TrainStep) -> bool:
    """Whether every transpose that the optimizer keeps is that of its matrix."""
    right = []
    for group in step.optimizer.transposes:
        flat = torch.cat([step.optimizer.parameters[i].detach().flatten() for i in group.indices])
        start = 0
        for rows, columns in group.shapes:
            place = slice(start, start := start + rows * columns)
            turned = group.memory[place].view(columns, rows)
            right.append(torch.equal(turned, flat[place].view(rows, columns).T))
    assert len(right) == 4 * SHAPE.num_layers
    return all(right)


@pytest.mark.long
@pytest.mark.parametrize("changes", [{}, {"max_grad_norm": 1.0}], ids=str)
def test_step_trains_as_without_and_keeps_transposes(
    changes: dict[str, Any], turn: Callable[[int], None], device: torch.device
) -> None:
    """With updates block by block, and with all of them at the end."""
    curves = []
    for choice in (0, 2):
        turn(choice)
        step = make_step(device, **changes)
        assert isinstance(step.weight_copies, TransposedWeights) == (choice > 0)
        curves.append(train(step))
        assert choice == 0 or kept(step)
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)
    assert curves[0][0] > curves[0][-1]


def spoilt(step: TrainStep) -> list[float]:
    """The losses of two steps after a weight was changed by hand."""
    train(step, 1)
    with torch.no_grad():
        step.model.get_parameter("layers.1.w_down").mul_(5)
    return train(step, 2)


@pytest.mark.long
def test_weight_that_is_changed_by_hand_is_transposed_again(
    turn: Callable[[int], None], device: torch.device
) -> None:
    """The second loss shows the first step's gradients; the forward pass reads no transpose."""
    turn(0)
    expected = spoilt(make_step(device))
    turn(1)
    assert spoilt(make_step(device)) == pytest.approx(expected, rel=1e-5)


# -- the update -----------------------------------------------------------------------------------

SHAPES = [
    [(6, 4), (4, 3), (10, 4), (4, 5)],
    [(64, 32), (32, 32), (128, 32), (32, 64)],
    [(33, 32), (32, 64), (6, 64), (64, 6)],
]
RATES: dict[str, Any] = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


def state_of(shapes: list[tuple[int, int]], device: torch.device, found_inf: float = 0.0) -> State:
    generator = torch.Generator().manual_seed(0)
    size = sum(rows * columns for rows, columns in shapes)
    lists: list[Any] = [
        [(torch.randn(size, generator=generator) * 0.1).abs().to(device)] for _ in range(4)
    ]
    return State._make((*lists, *(torch.tensor(n, device=device) for n in (2.0, found_inf))))


@pytest.mark.parametrize(
    ("shapes", "beside", "found_inf"),
    [
        (SHAPES[0], True, 0.0),
        (SHAPES[1], False, 0.0),
        (SHAPES[1], True, 1.0),
        (SHAPES[2], False, 0.0),
    ],
    ids=["ragged", "even", "even, not finite", "ragged rows"],
)
def test_matrices_are_updated_as_any_parameter(
    shapes: list[tuple[int, int]], beside: bool, found_inf: float, device: torch.device
) -> None:
    """To the bit, and their transposes are written; nothing is where ``found_inf`` says so."""
    states = [state_of(shapes, device, found_inf) for _ in range(2)]
    before = states[0].param[0].clone()
    update(states[0], lr=0.1, weight_decay=0.01, **RATES)
    factors = count(states[1].step, states[1].found_inf, 0.1, 0.9, 0.95, 0.01)
    transposes = torch.full_like(before, -1)
    update_matrices(states[1], shapes, transposes, factors, **RATES, few_programs=beside)
    assert states[0].step == states[1].step
    for plain, updated in zip(states[0][:4], states[1][:4], strict=True):
        assert all(map(torch.equal, plain, updated))
    start = 0
    for rows, columns in shapes:
        place = slice(start, start := start + rows * columns)
        matrix = states[1].param[0][place].view(rows, columns)
        expected = matrix.T if not found_inf else torch.full_like(matrix.T, -1)
        assert torch.equal(transposes[place].view(columns, rows), expected)
    assert torch.equal(states[1].param[0], before) == bool(found_inf)
