"""How kernels are called: how often, with any leading axes, with inputs of two dtypes."""

import pytest
import torch

from correctness_tests.support.rounding import randn
from tinyllama.harness import Op
from tinyllama.harness.declare.autograd import several
from tinyllama.ops.add_rms_norm import add_rms_norm
from tinyllama.ops.linear import linear
from tinyllama.ops.rms_norm import rms_norm

pytest.importorskip("triton")

FP32, BF16 = torch.float32, torch.bfloat16


LEADING = [
    *((rms_norm, axes) for axes in ((), (2, 0), (2, 3, 1, 5))),
    *((linear, axes) for axes in ((), (2, 3, 5))),
    (add_rms_norm, (2, 3, 1)),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("op", "leading"),
    LEADING,
    ids=lambda value: value.name if isinstance(value, Op) else str(value),
)
def test_leading_axes_are_compiled_as_they_are_called(
    op: Op, leading: tuple[int, ...], device: torch.device
) -> None:
    """One row after the other, however they are counted; the compiler is told of these shapes."""
    shapes = [
        (*leading, 24)
        if declared.axes[: len(op.leading)] == op.leading
        else (24,) * len(declared.axes)
        for declared in op.inputs.values()
    ]
    tensors = [randn(*shape, device=device, seed=seed) for seed, shape in enumerate(shapes)]
    call = op["triton"].call
    of_calls = []
    for function in (
        call,
        torch.compile(call, fullgraph=True, backend="aot_eager"),
        op["eager"].call,
    ):
        leaves = [x.clone().requires_grad_() for x in tensors]
        results = several(function(*leaves))
        upstream = [randn(*y.shape, device=device, seed=9) for y in results]
        of_calls.append([*results, *torch.autograd.grad(results, leaves, upstream)])
    for ours, compiled, stock in zip(*of_calls, strict=True):
        assert torch.equal(ours, compiled)
        torch.testing.assert_close(ours, stock)


def test_narrow_x_beside_a_wide_residual_gets_its_gradient_in_its_own_dtype(
    device: torch.device,
) -> None:
    x = randn(2, 3, 16, device=device, dtype=BF16).requires_grad_()
    residual = randn(2, 3, 16, device=device, seed=1).requires_grad_()
    weight = torch.ones(16, device=device, requires_grad=True)
    with torch.autocast(device.type, BF16):
        y, total = add_rms_norm(x, residual, weight, provider="triton")
    assert (y.dtype, total.dtype) == (BF16, FP32)
    dx, dresidual = torch.autograd.grad((y.float().sin() + total.cos()).sum(), (x, residual))
    assert (dx.dtype, dresidual.dtype) == (BF16, FP32)
    assert torch.equal(dx, dresidual.to(BF16))
