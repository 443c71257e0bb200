"""Kernels compute in float32 and round once: a 16-bit result is what float32 gives for the same
values, rounded. The bounds of accuracy allow more: three times the reference's error hides a sum or
a factor that is rounded on the way."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.support.launched import tree_ops
from tinyllama.harness import Op, Provider
from tinyllama.harness.check.cases import OpCase, elements
from tinyllama.harness.check.evaluate import evaluate
from tinyllama.harness.check.launched import with_kernels
from tinyllama.harness.declare.autograd import several

# What is rounded on the way by design: operands of products, and results that are stored between.
TWICE = {
    "add_rms_norm": "the norm is that of the sum as it is stored",
    "attention": "weights are operands of products",
    "block": "made of products",
    "linear_cross_entropy": "logits are stored",
    "stack": "made of products",
    "swiglu": "gate and up are stored",
}
ONCE = [
    (op, provider)
    for op, provider in with_kernels(tree_ops())
    if op.name not in TWICE and not op.mutated
]
each_provider = pytest.mark.parametrize(
    ("op", "provider"), ONCE, ids=[str(provider) for _, provider in ONCE]
)
# A GPU, and a BLAS, add up in another order for each dtype: a result may differ by as many times
# float32's epsilon of the largest input or result, and a share of the elements by a rounding to 16
# bits.
NOISE, MOST = 32.0, 0.02


def _in_one_order(op: Op, device: torch.device) -> bool:
    return device.type == "cpu" and op.name != "linear"


def _assert_exact(
    op: Op, result: torch.Tensor, exact: torch.Tensor, inputs: Sequence[torch.Tensor], what: str
) -> None:
    """The result is the exact one, rounded. inputs: what it was made from."""
    rounded = exact.to(result.dtype)
    wrong = (result != rounded) & ~(result.isnan() & rounded.isnan())
    most = 0.0
    if not _in_one_order(op, result.device) and result.numel():
        floats = (
            tensor for tensor in (exact, *inputs) if tensor.is_floating_point() and tensor.numel()
        )
        largest = max(tensor.abs().max().item() for tensor in floats)
        wrong &= (result - rounded).abs() > NOISE * torch.finfo(torch.float32).eps * largest
        most = MOST * wrong.numel()
    assert wrong.sum() <= most, f"{what}: {wrong.sum()} of {wrong.numel()} elements"


@pytest.mark.long
@each_provider
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_16_bits_are_those_of_float32_rounded_once(
    op: Op, provider: Provider, dtype: torch.dtype, device: torch.device, seed: int
) -> None:
    most = max(op.cases, key=lambda case: elements(op, case))
    for case in op.cases:
        op_case = OpCase(op, provider, case, dtype)
        if op_case.unsupported() is not None:
            continue
        for extreme in (None, *op.extremes) if case in (op.cases[0], most) else (None,):
            inputs = replace(op_case, extreme=extreme).inputs(device, seed)
            narrow = evaluate(op, provider.call, inputs)
            wide = evaluate(op, provider.call, inputs.to(torch.float32))
            for name, value in narrow.items():
                tensors = list(inputs.args.values())
                _assert_exact(op, value, wide[name], tensors, f"{op_case} {extreme}: {name}")


@pytest.mark.parametrize(
    ("op", "provider"),
    [(op, provider) for op, provider in ONCE if len(op.differentiable) > 1 and op.name != "linear"],
    ids=lambda provider: provider.name,
)
def test_a_wider_input_keeps_its_precision_beside_a_narrow_one(
    op: Op, provider: Provider, device: torch.device, seed: int
) -> None:
    """The first input has 16 bits, the others 32, as activations and weights often do: results in
    32 bits are those of float32. (A `linear` multiplies in the dtype of x.)"""
    inputs = OpCase(op, provider, op.cases[0], torch.bfloat16).inputs(device, seed)
    gradients = []
    for narrow in (True, False):
        args = {name: tensor if narrow else tensor.float() for name, tensor in inputs.args.items()}
        first, *rest = op.differentiable
        args |= {name: args[name].float() for name in rest}
        leaves = [args[name].requires_grad_() for name in (first, *rest)]
        outputs = several(provider.call(*args.values(), **inputs.params))
        gradients_above = [up for up in inputs.upstream.values() if up is not None]
        upstream = [
            up.to(tensor.dtype) for up, tensor in zip(gradients_above, outputs, strict=True)
        ]
        grads = torch.autograd.grad(outputs, leaves, upstream)
        gradients.append([*outputs, *grads])
        assert [grad.dtype for grad in grads] == [tensor.dtype for tensor in leaves]
    for result, exact in zip(*gradients, strict=True):
        _assert_exact(op, result, exact, leaves, f"{op.name}, {result.dtype}")
