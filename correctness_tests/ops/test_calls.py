"""How kernels are called: how often, with any leading axes, with inputs of two dtypes."""

from functools import partial

import pytest
import torch

from correctness_tests.support.rounding import randn
from tinyllama.harness import Op
from tinyllama.harness.correct.cases import elements
from tinyllama.harness.correct.evaluate import make_inputs
from tinyllama.harness.declare.autograd import apart, several
from tinyllama.harness.kernels import layout
from tinyllama.harness.kernels.launch import recorded
from tinyllama.ops.add_rms_norm import add_rms_norm
from tinyllama.ops.cross_entropy import cross_entropy
from tinyllama.ops.linear import linear
from tinyllama.ops.rms_norm import rms_norm
from tinyllama.ops.rope import rope
from tinyllama.ops.silu_mul import silu_mul
from tinyllama.ops.swiglu import swiglu

pytest.importorskip("triton")

FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("op", "forward", "backward"),
    [
        *((rms_norm, 1, 2), (add_rms_norm, 1, 2), (rope, 1, 1)),
        *((silu_mul, 1, 1), (swiglu, 1, 1), (cross_entropy, 1, 1)),
    ],
    ids=lambda value: value.name if isinstance(value, Op) else "",
)
def test_kernels_are_launched_so_often(op: Op, forward: int, backward: int) -> None:
    inputs = make_inputs(op, max(op.cases, key=partial(elements, op)), BF16, "meta")
    args = [inputs.args[n].requires_grad_(n in op.differentiable) for n in op.inputs]
    copies = layout.copies
    with recorded("gfx942") as launches:
        outputs = several(op["triton"].call(*args, **inputs.params))
        assert len(launches) == forward
        wanted = [inputs.args[name] for name in op.differentiable]
        torch.autograd.grad(outputs, wanted, list(inputs.upstream.values()))
    assert len(launches) == forward + backward
    assert layout.copies == copies


LEADING = [
    *((rms_norm, axes) for axes in ((), (3,), (2, 0), (2, 3, 1, 5))),
    *((linear, axes) for axes in ((), (2, 0), (2, 3, 5))),
    (add_rms_norm, (2, 3, 1)),
]


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
    given = [randn(*shape, device=device, seed=seed) for seed, shape in enumerate(shapes)]
    call = op["triton"].call
    found = []
    for function in (
        call,
        torch.compile(call, fullgraph=True, backend="aot_eager"),
        op["eager"].call,
    ):
        leaves = [x.clone().requires_grad_() for x in given]
        results = several(function(*leaves))
        upstream = [randn(*y.shape, device=device, seed=9) for y in results]
        found.append([*results, *torch.autograd.grad(results, leaves, upstream)])
    for ours, compiled, stock in zip(*found, strict=True):
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


def test_a_result_that_shares_memory_with_any_argument_is_copied() -> None:
    first, last = torch.ones(2), torch.ones(2)
    alone = torch.ones(2)
    found = apart([first.view(2, 1), last.view(2, 1), alone, alone[:1]], [first, 3, last])
    assert [one.data_ptr() for one in found[2:3]] == [alone.data_ptr()]
    assert len({one.data_ptr() for one in (first, last, *found)}) == 6
