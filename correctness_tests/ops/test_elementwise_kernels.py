"""What the derived cases cannot ask of the kernels of norms, rotation and activation.

Their launchers, which the block calls with mixed dtypes and views of packed buffers; gradients that
are not wanted; tensors that share memory; edges of blocks; how often a kernel is launched.
"""

from typing import Any

import pytest
import torch

from tinyllama.harness import Op
from tinyllama.harness.correct.evaluate import make_inputs
from tinyllama.harness.kernels import layout
from tinyllama.harness.kernels.launch import recorded
from tinyllama.harness.machine.device import cannot
from tinyllama.ops.add_rms_norm import add_norm_forward, add_rms_norm
from tinyllama.ops.rms_norm import kernels as norms
from tinyllama.ops.rms_norm import norm_backward, norm_forward, partial_rows, rms_norm, sum_rows
from tinyllama.ops.rope import rope, rope_tables, rotate
from tinyllama.ops.silu_mul import activate, activate_backward, silu_mul
from tinyllama.ops.swiglu import swiglu

pytestmark = pytest.mark.skipif(
    cannot("triton", torch.device("cpu")) is not None, reason="triton is not installed"
)

FP32, BF16 = torch.float32, torch.bfloat16
OURS = [rms_norm, add_rms_norm, rope, silu_mul, swiglu]
EPS = 1e-5


def randn(*shape: int, device: torch.device, dtype: torch.dtype = FP32, seed: int = 0) -> Any:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(device, dtype)


def assert_rounded(result: torch.Tensor, exact: torch.Tensor, roundings: int = 1) -> None:
    """As far from float64 as so many roundings to the result's dtype leave it, at most: one is
    half a unit of the last place."""
    error = (result.double() - exact).norm()
    assert error <= 0.5 * roundings * torch.finfo(result.dtype).eps * exact.norm()


def norm_in_double(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y and the gradients of x and weight, in float64 by autograd."""
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    y = rms_norm(x[None], weight, eps=EPS)[0]
    return y.detach(), *torch.autograd.grad(y, (x, weight), dy.double())


# -- norms --------------------------------------------------------------------------------------


@pytest.mark.parametrize("D", [1, 15, 16, 17, 127, 129, 4096, 4097, norms.WIDEST])
def test_a_norm_of_any_width_up_to_the_widest(D: int, device: torch.device) -> None:
    x, dy = randn(3, D, device=device), randn(3, D, device=device, seed=1)
    weight = 1 + randn(D, device=device, seed=2)
    y, dx, dweight = norm_in_double(dy, x, weight)
    got, rstd = norm_forward(x, weight, EPS, FP32)
    got_dx, low, partials = norm_backward(dy, x, weight, rstd)
    assert low is None
    assert_rounded(got, y, 8)
    assert_rounded(sum_rows(partials[None])[0], dweight, 8)
    # In one column dx cancels to what epsilon leaves; its terms are as large as dy rstd.
    terms = dx if D > 1 else dy.double() * rstd.double()[:, None]
    assert (got_dx.double() - dx).norm() <= 4 * torch.finfo(FP32).eps * terms.norm()
    added = randn(3, D, device=device, seed=3)
    with_residual, _, _ = norm_backward(dy, x, weight, rstd, added)
    assert_rounded(with_residual, got_dx.double() + added.double(), 2)


def test_a_row_that_is_too_wide_is_refused_with_the_limit(device: torch.device) -> None:
    x = torch.empty(1, norms.WIDEST + 1, device=device)
    with pytest.raises(ValueError, match=r"D = 16385 is more than 16384.*use the provider 'torch'"):
        norm_forward(x, x[0], EPS, FP32)
    assert rms_norm["triton"].supports({"D": norms.WIDEST}) is None
    assert "16384" in str(rms_norm["triton"].supports({"D": norms.WIDEST + 1}))


@pytest.mark.parametrize("D", [24, 512])  # without and with prefetching
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 63, 65])
def test_every_row_is_summed_once_whatever_the_number_of_programs(
    rows: int, D: int, device: torch.device
) -> None:
    ones, weight = torch.ones(rows, D, device=device), torch.ones(D, device=device)
    rstd = torch.arange(rows, device=device, dtype=FP32)
    dx, _, partials = norm_backward(ones, ones, weight, rstd, rstd[:, None].expand(rows, D))
    assert partials.shape == (partial_rows(rows, device), D)
    assert torch.equal(sum_rows(partials[None])[0], rstd.sum().expand(D))
    expected = 2 * rstd[:, None] - (rstd**3)[:, None]  # rstd + rstd (1 - n mean(n)) with n = rstd
    torch.testing.assert_close(dx, expected.expand(rows, D))


def test_partial_sums_of_two_norms_are_reduced_by_one_launch(device: torch.device) -> None:
    N, D = 37, 40
    buffer = torch.full((2, partial_rows(N, device), D), torch.nan, device=device)
    x, weight = randn(N, D, device=device), torch.ones(D, device=device)
    expected = []
    for layer in range(2):
        dy = randn(N, D, device=device, seed=layer + 1)
        _, rstd = norm_forward(x, weight, EPS, FP32)
        _, _, partials = norm_backward(dy, x, weight, rstd, weight_partials=buffer[layer])
        assert partials.data_ptr() == buffer[layer].data_ptr()
        expected.append(norm_in_double(dy, x, weight)[2])
    found = sum_rows(buffer)
    assert_rounded(found, torch.stack(expected), 8)
    assert torch.equal(sum_rows(buffer, BF16), found.to(BF16))
    with pytest.raises(ValueError, match="partial_rows gives the first"):
        norm_backward(dy, x, weight, rstd, weight_partials=buffer[0, :1, :8])


def test_dtypes_are_mixed_as_the_block_mixes_them(device: torch.device) -> None:
    """A product in bf16 is added to a stream in fp32; back comes dx in both dtypes."""
    N, D = 19, 48
    x, residual = randn(N, D, device=device, dtype=BF16), randn(N, D, device=device, seed=1)
    weight = 1 + 0.3 * randn(D, device=device, seed=2)
    dy, dsum = randn(N, D, device=device, dtype=BF16, seed=3), randn(N, D, device=device, seed=4)
    y, total, rstd = add_norm_forward(x, residual, weight, EPS, BF16)
    assert (y.dtype, total.dtype, rstd.dtype) == (BF16, FP32, FP32)
    assert torch.equal(total, x.float() + residual)
    exact, exact_dx, exact_dweight = norm_in_double(dy, total, weight)
    assert_rounded(y, exact)
    dx, low, partials = norm_backward(dy, total, weight, rstd, dsum, BF16)
    assert low is not None
    assert (dx.dtype, low.dtype, partials.dtype) == (FP32, BF16, FP32)
    assert_rounded(dx, exact_dx + dsum.double(), 8)
    assert torch.equal(low, dx.to(BF16)), "the second output is not the first, rounded"
    assert_rounded(sum_rows(partials[None])[0], exact_dweight, 8)


def test_the_norm_is_that_of_the_rounded_sum(device: torch.device) -> None:
    x, residual = (randn(5, 32, device=device, dtype=BF16, seed=seed) for seed in (0, 1))
    weight = torch.ones(32, device=device, dtype=BF16)
    y, total, _ = add_norm_forward(x, residual, weight, EPS, FP32)
    assert torch.equal(total, x + residual)
    assert_rounded(y, norm_in_double(y, total, weight)[0], 8)


def test_rows_may_lie_apart(device: torch.device) -> None:
    """Halves of a packed buffer are read where they lie."""
    packed, weight = randn(9, 64, device=device), torch.ones(32, device=device)
    left, right = packed.chunk(2, -1)
    before = layout.copies
    y, total, rstd = add_norm_forward(left, right, weight, EPS, FP32)
    dx, _, _ = norm_backward(right, left, weight, rstd, right)
    assert layout.copies == before
    same = add_norm_forward(left.contiguous(), right.contiguous(), weight, EPS, FP32)
    assert torch.equal(y, same[0])
    assert torch.equal(total, same[1])
    dense = [half.contiguous() for half in (right, left, right)]
    assert torch.equal(dx, norm_backward(dense[0], dense[1], weight, rstd, dense[2])[0])


def test_one_gradient_for_two_inputs_can_be_accumulated_apart(device: torch.device) -> None:
    """x and residual get one tensor; what autograd adds to one of them may not reach the other."""
    x, residual = (randn(2, 3, 16, device=device, seed=s).requires_grad_() for s in (0, 1))
    weight = torch.ones(16, device=device, requires_grad=True)

    def run(factor: float) -> None:
        # x also reaches the loss directly, so that its gradient is a sum.
        y, total = add_rms_norm(x, residual, weight, provider="triton")
        (factor * (y.sin().sum() + total.cos().sum() + 3 * x.sum())).backward()

    run(1.0)
    first = residual.grad.clone()
    torch.testing.assert_close(x.grad, first + 3)
    assert x.grad.data_ptr() != residual.grad.data_ptr()
    x.grad.zero_()
    assert torch.equal(residual.grad, first)
    run(2.0)
    torch.testing.assert_close(residual.grad, 3 * first)
    torch.testing.assert_close(x.grad, 2 * first + 6)


def test_two_leaves_with_one_gradient_do_not_share_it(device: torch.device) -> None:
    leaves = [randn(1, 2, 16, device=device, seed=s).requires_grad_() for s in (0, 1)]
    y, total = add_rms_norm(*leaves, torch.ones(16, device=device), provider="triton")
    (y.sum() + total.sin().sum()).backward()
    one, other = (leaf.grad for leaf in leaves)
    assert torch.equal(one, other)
    one.zero_()
    assert other.any()


# -- rotation -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("H", "G"), [(1, 1), (3, 1), (4, 2), (5, 5)])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_rotation_in_place_in_a_packed_buffer(
    H: int, G: int, dtype: torch.dtype, device: torch.device
) -> None:
    """As the block does it: q, k and v lie side by side; v stays, and back is back."""
    B, T, K = 2, 5, 24
    packed = randn(B, T, H + 2 * G, K, device=device, dtype=dtype)
    cos, sin = (table.to(device) for table in rope_tables(T, K))
    q, k, v = packed.split((H, G, G), 2)
    before = packed.clone()
    expected = rope(q.double(), k.double(), *(table.double() for table in (cos, sin)))
    copies = layout.copies
    rotate(q, k, cos, sin, q, k)
    assert layout.copies == copies
    for got, wanted, old in zip((q, k), expected, before.split((H, G, G), 2)[:2], strict=True):
        assert_rounded(got, wanted, 1 if dtype is BF16 else 4)
        assert (got[:, 1:] != old[:, 1:]).any(-1).all(), "a head was not rotated"
    assert torch.equal(v, before[:, :, H + G :])
    rotate(q, k, cos, sin, q, k, inverse=True)
    assert_rounded(packed, before.double(), 4)


def test_one_of_the_two_may_be_left_out(device: torch.device) -> None:
    q, k = randn(1, 4, 3, 8, device=device), randn(1, 4, 2, 8, device=device, seed=1)
    cos, sin = (table.to(device) for table in rope_tables(4, 8))
    both = torch.empty_like(q), torch.empty_like(k)
    rotate(q, k, cos, sin, *both)
    alone = torch.empty_like(q), torch.empty_like(k)
    rotate(q, None, cos, sin, alone[0], None)
    rotate(None, k, cos, sin, None, alone[1])
    assert torch.equal(both[0], alone[0])
    assert torch.equal(both[1], alone[1])


def test_rotation_refuses_an_output_that_it_cannot_write(device: torch.device) -> None:
    q = randn(1, 2, 2, 8, device=device)
    cos, sin = (table.to(device) for table in rope_tables(2, 8))
    out = torch.empty(1, 2, 2, 16, device=device)[..., ::2]
    with pytest.raises(ValueError, match="make the last one 1"):
        rotate(q, q, cos, sin, out, out)


# -- activation ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("N", "F"), [(1, 1), (3, 1023), (2, 1024), (2, 1025), (5, 2049), (1030, 2)]
)
def test_activation_of_any_shape_in_the_halves_of_a_buffer(
    N: int, F: int, device: torch.device
) -> None:
    packed, dh = randn(N, 2 * F, device=device), randn(N, F, device=device, seed=1)
    gate, up = packed.chunk(2, -1)
    exact = [half.double().requires_grad_() for half in (gate, up)]
    h = torch.nn.functional.silu(exact[0]) * exact[1]
    expected = torch.autograd.grad(h, exact, dh.double())
    copies = layout.copies
    assert_rounded(activate(gate, up), h.detach(), 8)
    found = torch.full_like(packed, torch.nan)
    again = torch.full((N, F + 3), torch.nan, device=device)[:, :F]
    dgate, dup = found.chunk(2, -1)
    activate_backward(dh, gate, up, dgate, dup, again)
    assert layout.copies == copies
    assert torch.equal(again, activate(gate, up)), "h made again is not h"
    for got, wanted in zip(found.chunk(2, -1), expected, strict=True):
        assert_rounded(got, wanted, 8)
    apart = torch.full((N, 3 * F), torch.nan, device=device)[:, :F], torch.empty_like(dh)
    activate_backward(dh, gate, up.contiguous(), *apart)  # every tensor with a stride of its own
    assert torch.equal(torch.cat(apart, -1), found)
    activate_backward(dh, gate, up, gate, up)  # in place
    assert torch.equal(packed, found)


def test_activation_neither_overflows_nor_cancels(device: torch.device) -> None:
    gate = torch.tensor(
        [[-1e30, -200.0, -90.0, -20.0, 0.0, 20.0, 90.0, 200.0, 1e30]], device=device
    )
    ones, found = torch.ones_like(gate), [torch.empty_like(gate) for _ in range(3)]
    activate_backward(ones, gate, ones, *found)
    exact = gate.double().requires_grad_()
    h = torch.nn.functional.silu(exact)
    (dgate,) = torch.autograd.grad(h.sum(), exact)
    tiny = torch.finfo(FP32).tiny  # below it a GPU may give zero
    torch.testing.assert_close(found[0].double(), dgate, rtol=1e-5, atol=tiny)
    torch.testing.assert_close(found[1].double(), h.detach(), rtol=1e-5, atol=tiny)
    torch.testing.assert_close(found[2].double(), h.detach(), rtol=1e-5, atol=tiny)


@pytest.mark.parametrize("provider", ["triton", "naive"])
def test_weights_side_by_side_are_one_product_with_the_same_result(
    provider: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weights = randn(2, 3, 20, device=device), randn(2 * 12, 20, device=device, seed=1)
    products = []
    known = torch.mm

    def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
        products.append(args)
        return known(*args, **kwargs)

    monkeypatch.setattr(torch, "mm", noted)
    results = []
    for parts in (weights.chunk(2), [half.clone() for half in weights.chunk(2)]):
        leaves = [leaf.detach().requires_grad_() for leaf in (x, *parts)]
        products.clear()
        h = swiglu(*leaves, provider=provider)
        forward = len(products)
        results.append([h, *torch.autograd.grad(h.sin().sum(), leaves)])
        beside = parts[0].data_ptr() + parts[0].nbytes == parts[1].data_ptr()
        assert provider == "naive" or forward == (1 if beside else 2)
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two)


# -- all of them --------------------------------------------------------------------------------


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
