"""In tf32 no gradient of V4's step has a scale error, though matrix units cut their operands.

A stand-in for a GPU cuts what kernels multiply. They round it first.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.support.cut_operands import cut_operands
from correctness_tests.support.stacks import (  # noqa: F401 (fixtures)
    forced,
    plans_forgotten,
    turn_fixture,
)
from correctness_tests.support.steps import SHAPE
from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.evaluate import evaluate
from tinyllama.harness.kernels import HAS_DESCRIPTORS
from tinyllama.harness.kernels.configs import Config
from tinyllama.harness.kernels.tf32 import rounded_to_tf32
from tinyllama.model.config import TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import V4
from tinyllama.ops import OPS
from tinyllama.ops.attention import attend, attend_backward, attention
from tinyllama.ops.stack import provider_of
from tinyllama.ops.stack.configs import PRODUCTS
from tinyllama.training.step import TrainStep

pytestmark = pytest.mark.long

MODEL = replace(SHAPE, num_layers=2, ffn_dim=128, num_heads=2, num_kv_heads=1)
ROWS, TOKENS = 4, 16
BOUND = 5e-4  # of the share of an error that points along the gradient
TILES = Config(BM=32, BN=32, BK=32, GROUP=8, DESCRIBED=1, num_warps=4, num_stages=2)

ROUND = False
if HAS_DESCRIPTORS:
    from triton.tools.tensor_descriptor import TensorDescriptor

    ROUND = "round_f32_to_tf32" in TensorDescriptor.__dataclass_fields__
described = pytest.mark.skipif(not ROUND, reason="this triton interprets no rounding descriptors")


def batch() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(MODEL.vocab_size, (ROWS, TOKENS + 1), generator=generator)


@pytest.fixture(scope="module")
def exact() -> dict[str, torch.Tensor]:
    model = TinyLlama(MODEL, "v1").double()
    model.loss(batch()[:, :-1], batch()[:, 1:]).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def scale_error(gradient: Any, exact: torch.Tensor) -> float:
    along = ((gradient.double() - exact) * exact).sum() / exact.square().sum()
    return float(along.abs())


def largest_error(
    exact: dict[str, torch.Tensor], plan: str = "all", described: bool = False
) -> float:
    """The largest scale error of a parameter's gradient in a step."""
    config = TrainConfig(batch_size=ROWS, seq_len=TOKENS, precision="fp32")
    with cut_operands(), ExitStack() as every:
        step = TrainStep(TinyLlama(MODEL, V4.with_plan(plan)), config)
        if described:
            tiles = {f"stack.{name}": TILES for name in PRODUCTS}
            probe = partial(step.probe, batch()[:, :-1], batch()[:, 1:])
            every.enter_context(forced(probe, tiles.get))
        step.prepare(warm_up=0)
        step(batch())
    grads = {name: p.grad for name, p in step.model.named_parameters()}
    return max(scale_error(grads[name], expected) for name, expected in exact.items())


@pytest.mark.parametrize("plan", ["all", "single"])
def test_operands_are_rounded_in_registers(plan: str, exact: dict[str, torch.Tensor]) -> None:
    assert largest_error(exact, plan) < BOUND


def rounded(x: Any) -> Any:
    wide = isinstance(x, torch.Tensor) and x.dtype is torch.float32
    return rounded_to_tf32(x.detach().contiguous()) if wide else x


@pytest.mark.parametrize(
    ("name", "provider"),
    [("attention", "triton"), ("block", "triton"), ("stack", "all"), ("stack", "single")],
)
def test_no_operand_of_a_kernel_is_cut_that_was_not_rounded(name: str, provider: str) -> None:
    """Of inputs and upstream gradients that are, in the first case and in the longest one. What
    another kernel or a BLAS made, and a kernel reads as it is, was rounded where it was made."""
    op = OPS[name]
    chosen = op[provider_of(provider) if name == "stack" else provider]
    for case in (op.cases[0], max(op.cases, key=lambda case: int(case.dims["T"]))):
        inputs = OpCase(op, chosen, case, torch.float32).inputs()
        args, upstream = (
            {key: rounded(x) for key, x in values.items()}
            for values in (inputs.args, inputs.upstream)
        )
        with cut_operands() as changed:
            evaluate(op, chosen.call, replace(inputs, args=args, upstream=upstream))
        assert changed
        assert not [kernel for kernel, wrong in changed.items() if wrong]


@described
def test_descriptors_round_operands(
    exact: dict[str, torch.Tensor], turn: Callable[[int], None]
) -> None:
    turn(2)
    assert largest_error(exact, described=True) < BOUND


@pytest.mark.parametrize("tokens", [48, 150])
def test_attention_rounds_weights_and_their_gradients(tokens: int) -> None:
    """With operands in tf32 the four results have no scale error."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (
        rounded_to_tf32(torch.randn(2, tokens, heads, 32, generator=generator))
        for heads in (4, 2, 2, 4)
    )
    wide = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    expected = attention["eager"].call(*wide)
    grads = torch.autograd.grad(expected, wide, do.double())
    exact = (expected.detach(), *grads)
    with cut_operands():
        o, lse = attend(q, k, v)
        gradients = [torch.empty_like(tensor) for tensor in (q, k, v)]
        attend_backward(do, q, k, v, o, lse, *gradients)
    errors = [scale_error(*both) for both in zip((o, *gradients), exact, strict=True)]
    assert max(errors) < 5e-5, errors
