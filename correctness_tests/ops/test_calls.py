"""How kernels are called: gradients that are not wanted, no rows, autocast, and how often."""

import pytest
import torch

from correctness_tests.support.rounding import randn
from tinyllama.harness import Op
from tinyllama.harness.correct.evaluate import make_inputs
from tinyllama.harness.kernels import layout
from tinyllama.harness.kernels.launch import recorded
from tinyllama.harness.machine.device import cannot
from tinyllama.ops.add_rms_norm import add_rms_norm
from tinyllama.ops.rms_norm import rms_norm
from tinyllama.ops.rope import rope
from tinyllama.ops.silu_mul import silu_mul
from tinyllama.ops.swiglu import swiglu

pytestmark = pytest.mark.skipif(
    cannot("triton", torch.device("cpu")) is not None, reason="triton is not installed"
)

FP32, BF16 = torch.float32, torch.bfloat16
OURS = [rms_norm, add_rms_norm, rope, silu_mul, swiglu]


@pytest.mark.parametrize("op", OURS, ids=lambda op: op.name)
def test_a_gradient_alone_is_what_it_is_among_all(op: Op, device: torch.device) -> None:
    inputs = make_inputs(op, op.cases[0], FP32, device)

    def gradients(wanted: set[str]) -> dict[str, torch.Tensor]:
        args = {k: v.detach().requires_grad_(k in wanted) for k, v in inputs.args.items()}
        outputs = op["triton"].call(*args.values(), **inputs.params)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        leaves = [args[name] for name in sorted(wanted)]
        used = [(y, dy) for y, dy in zip(outputs, inputs.upstream.values(), strict=True)]
        used = [(y, dy) for y, dy in used if y.requires_grad]
        found = torch.autograd.grad([y for y, _ in used], leaves, [dy for _, dy in used])
        return dict(zip(sorted(wanted), found, strict=True))

    together = gradients(set(op.differentiable))
    for name in op.differentiable:
        assert torch.equal(gradients({name})[name], together[name]), name


@pytest.mark.parametrize("op", OURS, ids=lambda op: op.name)
def test_no_rows_are_no_work(op: Op, device: torch.device) -> None:
    rows = {"B", "N"} & set(op.cases[0].dims)
    dims = {**op.cases[0].dims, **dict.fromkeys(rows, 0)}
    args = [
        torch.ones([dims[a] for a in t.axes], device=device, requires_grad=t.grad)
        for t in op.inputs.values()
    ]
    outputs = op["triton"].call(*args, **op.params)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    leaves = [arg for arg in args if arg.requires_grad]
    for leaf, gradient in zip(leaves, torch.autograd.grad(outputs, leaves, outputs), strict=True):
        assert gradient.shape == leaf.shape
        assert not gradient.any()


@pytest.mark.parametrize(
    ("op", "forward", "backward"),
    [(rms_norm, 1, 2), (add_rms_norm, 1, 2), (rope, 1, 1), (silu_mul, 1, 1), (swiglu, 1, 1)],
    ids=lambda value: value.name if isinstance(value, Op) else "",
)
def test_kernels_are_launched_so_often(op: Op, forward: int, backward: int) -> None:
    inputs = make_inputs(op, op.cases[0], BF16, "meta")
    args = [inputs.args[n].requires_grad_(n in op.differentiable) for n in op.inputs]
    copies = layout.copies
    with recorded("gfx942") as launches:
        outputs = op["triton"].call(*args, **inputs.params)
        assert len(launches) == forward
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        wanted = [inputs.args[name] for name in op.differentiable]
        torch.autograd.grad(outputs, wanted, list(inputs.upstream.values()))
    assert len(launches) == forward + backward
    assert layout.copies == copies


@pytest.mark.parametrize("op", OURS, ids=lambda op: op.name)
def test_autocasts_dtype_is_the_products_and_the_gradients_are_the_inputs(
    op: Op, device: torch.device
) -> None:
    inputs = make_inputs(op, op.cases[0], FP32, device)
    args = [inputs.args[n].requires_grad_(n in op.differentiable) for n in op.inputs]
    with torch.autocast(device.type, BF16):
        outputs = op["triton"].call(*args, **inputs.params)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    narrow = {"rms_norm": ("y",), "add_rms_norm": ("y",), "swiglu": ("h",)}.get(op.name, ())
    dtypes = {name: y.dtype for name, y in zip(op.outputs, outputs, strict=True)}
    assert dtypes == {name: BF16 if name in narrow else FP32 for name in op.outputs}
    leaves = [arg for arg in args if arg.requires_grad]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    rest = [arg.double() for arg in args if not arg.requires_grad]
    expected = op["eager"].call(*exact, *rest, **inputs.params)
    expected = expected if isinstance(expected, tuple) else (expected,)
    found = torch.autograd.grad(outputs, leaves, [torch.ones_like(y) for y in outputs])
    oracle = torch.autograd.grad(expected, exact, [torch.ones_like(y) for y in expected])
    for leaf, got, wanted in zip(leaves, found, oracle, strict=True):
        assert got.dtype == leaf.dtype
        error = (got.double() - wanted).norm()
        assert error <= 4 * torch.finfo(BF16).eps * wanted.norm()


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
