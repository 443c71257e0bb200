"""What only a step with fused blocks has: weights that are rounded and transposed, early updates,
and a plan.

The kernels are those of the op `stack`, which the suites of `correctness_tests/ops` hold.
"""

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
from tinyllama.harness.machine.device import cannot
from tinyllama.model.config import WORKLOADS, ConfigError, ModelConfig, TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.optim import TransposedWeights
from tinyllama.model.tiers import V3, V4, StepPlan, Tier
from tinyllama.ops.adamw import State, count, update, update_matrices
from tinyllama.training.step import TrainStep, products

SHAPE = ModelConfig(
    hidden_dim=16, num_layers=3, num_heads=2, num_kv_heads=1, ffn_dim=24, vocab_size=20
)
CONFIG = TrainConfig(batch_size=2, seq_len=4, precision="bf16", learning_rate=1e-2)
TOKENS = torch.randint(20, (2, 5), generator=torch.Generator().manual_seed(0))


def make_step(
    device: torch.device, plan: StepPlan | None = None, tier: Tier = V4, **changes: Any
) -> TrainStep:
    model = TinyLlama(SHAPE, tier).to(device)
    return TrainStep(model, replace(CONFIG, **changes), plan)


def train(step: TrainStep, steps: int = 3) -> list[float]:
    tokens = TOKENS.to(step.device)
    step.prepare(warm_up=1)
    return [step(tokens[:, :-1], tokens[:, 1:]).item() for _ in range(steps)]


def weights(step: TrainStep) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in step.model.parameters()]


def same(tensors: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))


# -- rounded weights ------------------------------------------------------------------------------


@pytest.mark.long
def test_weight_that_is_changed_by_hand_is_rounded_again(device: torch.device) -> None:
    step, fresh = make_step(device), make_step(device)
    tokens = TOKENS.to(device)
    train(step, 1)
    before = step(tokens[:, :-1], tokens[:, 1:]).item()
    step.model.load_state_dict(fresh.model.state_dict())
    for tensor in step.optimizer.tensors().values():
        tensor.zero_()
    loss = step(tokens[:, :-1], tokens[:, 1:]).item()
    assert loss == train(fresh, 1)[0] != before


# -- transposed weights, in tf32 -------------------------------------------------------------------


def transposes_are_right(step: TrainStep) -> bool:
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
        step = make_step(device, tier=V4.with_plan("all"), precision="fp32", **changes)
        assert isinstance(step.weight_copies, TransposedWeights) == (choice > 0)
        curves.append(train(step))
        assert choice == 0 or transposes_are_right(step)
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)
    assert curves[0][0] > curves[0][-1]


def spoilt(device: torch.device) -> list[float]:
    """The losses of two steps after a weight was changed by hand."""
    step = make_step(device, tier=V4.with_plan("all"), precision="fp32")
    train(step, 1)
    with torch.no_grad():
        step.model.get_parameter("layers.1.w_down").mul_(5)
    return [step(TOKENS.to(device)).item() for _ in range(2)]


@pytest.mark.long
def test_weight_that_is_changed_by_hand_is_transposed_again(
    turn: Callable[[int], None], device: torch.device
) -> None:
    """The second loss shows the first step's gradients; the forward pass reads no transpose."""
    turn(0)
    expected = spoilt(device)
    turn(1)
    assert spoilt(device) == pytest.approx(expected, rel=1e-5)


# -- the update of matrices ------------------------------------------------------------------------

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


# -- a batch --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "named"),
    [([(2, 4)], r"windows of shape \(2, 4\).*\(2, 5\)"), ([(2, 4), (2, 5)], r"batch.*\(2, 5\)")],
)
def test_batch_of_another_shape_is_refused(shapes: list[tuple[int, int]], named: str) -> None:
    step = make_step(torch.device("cpu"))
    with pytest.raises(ValueError, match=named):
        step(*(torch.zeros(shape, dtype=torch.int64) for shape in shapes))


# -- updates beside the backward pass --------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_overlapped_step_gives_same_bits(device: torch.device, precision: str) -> None:
    at_the_end = replace(V4.plan(device.type), overlap=False, capture=False)
    steps = [make_step(device, plan, precision=precision) for plan in (None, at_the_end)]
    assert [step.plan.overlap for step in steps] == [True, False]
    losses = [train(step) for step in steps]
    assert losses[0] == losses[1]
    assert same(*map(weights, steps))
    assert same(*([*step.optimizer.tensors().values()] for step in steps))


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"max_grad_norm": 1.0}, "clipped gradients wait for the norm of all"),
        ({"accumulate": 2}, "accumulated gradients wait for the last micro-batch"),
        ({"precision": "fp16"}, "fp16 waits for gradients that are not finite"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_updates_wait_where_gradients_do(setting: dict[str, Any], reason: str) -> None:
    cpu = torch.device("cpu")
    step = make_step(cpu, **setting)
    assert not step.plan.overlap
    assert step.left_out["overlap"] == reason
    with pytest.raises(ConfigError, match=reason):
        make_step(cpu, StepPlan(overlap=True), **setting)
    with pytest.raises(ConfigError, match="the blocks of this tier are not one op"):
        TrainStep(TinyLlama(SHAPE, V3), CONFIG, StepPlan(overlap=True))


@pytest.mark.long
def test_step_whose_loss_is_not_finite_changes_nothing(device: torch.device) -> None:
    step = make_step(device)
    train(step, 1)
    with torch.no_grad():
        step.model.final_norm[0] = torch.nan
    before, tokens = weights(step), TOKENS.to(device)
    step(tokens[:, :-1], tokens[:, 1:])
    assert same(*([w.nan_to_num() for w in several] for several in (before, weights(step))))


@pytest.mark.gpu
@pytest.mark.parametrize("plan", [None, "single", "out+down+attention_gradient"])
@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_repeated_a_captured_step_gives_equal_bits(
    plan: str | None, precision: str, gpu: torch.device
) -> None:
    """Of the workload `small`, 50 times from one state: loss, gradients, parameters, moments."""
    if reason := cannot(precision, gpu) or cannot("cooperative", gpu):
        pytest.skip(reason)
    shape = WORKLOADS["small"]
    config = TrainConfig(
        batch_size=shape.batch_size, seq_len=shape.seq_len, precision=precision, learning_rate=1e-3
    )
    generator = torch.Generator().manual_seed(0)
    size = (config.batch_size, config.seq_len + 1)
    tokens = torch.randint(shape.model.vocab_size, size, generator=generator).to(gpu)
    with products(precision, gpu):
        step = TrainStep(TinyLlama(shape.model, V4.with_plan(plan)).to(gpu), config)
        step.prepare()
        assert step.graphs
        state = [*step.optimizer.parameters, *step.optimizer.tensors().values()]
        before = [tensor.detach().clone() for tensor in state]
        first: list[torch.Tensor] = []
        for repeat in range(50):
            with torch.no_grad():
                for tensor, copy in zip(state, before, strict=True):
                    tensor.copy_(copy)
            step(tokens)
            gradients = [parameter.grad for parameter in step.optimizer.parameters]
            results = [t.detach().clone() for t in (*state, *gradients, step.loss) if t is not None]
            assert len(results) == len(state) + len(gradients) + 1
            first = first or results
            assert same(results, first), f"repeat {repeat} differs"
    assert not same(first[: len(before)], before)
