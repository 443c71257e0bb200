"""What only a step with fused blocks has: rounded weights, early updates, and a plan.

The kernels are those of the op `stack`, which the suites of `correctness_tests/ops` hold.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tinyllama.harness.declare.registry import providers_restored
from tinyllama.harness.machine.device import cannot
from tinyllama.model.config import WORKLOADS, ConfigError, ModelConfig, TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import V3, V4, StepPlan
from tinyllama.ops.stack import stack
from tinyllama.training.step import TrainStep, products

SHAPE = ModelConfig(
    hidden_dim=16, num_layers=3, num_heads=2, num_kv_heads=1, ffn_dim=24, vocab_size=20
)
CONFIG = TrainConfig(batch_size=2, seq_len=4, precision="bf16", learning_rate=1e-2)
TOKENS = torch.randint(20, (2, 5), generator=torch.Generator().manual_seed(0))


def make_step(device: torch.device, plan: StepPlan | None = None, **changes: Any) -> TrainStep:
    model = TinyLlama(SHAPE, V4).to(device)
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
    with products(precision, gpu), providers_restored([stack]):
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
