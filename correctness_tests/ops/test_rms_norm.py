"""What the derived cases cannot ask of the norms: launchers with mixed dtypes and views of packed
buffers, tensors that share memory, edges of blocks.
"""

import pytest
import torch

from correctness_tests.support.rounding import assert_rounded, randn
from tinyllama.harness.kernels import layout
from tinyllama.ops.add_rms_norm import add_norm_forward, add_rms_norm
from tinyllama.ops.rms_norm import kernels as norms
from tinyllama.ops.rms_norm import norm_backward, norm_forward, partial_rows, rms_norm, sum_rows

pytest.importorskip("triton")

FP32, BF16 = torch.float32, torch.bfloat16
EPS = 1e-5


def norm_in_double(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y and the gradients of x and weight, in float64 by autograd."""
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    y = rms_norm(x[None], weight, eps=EPS)[0]
    return y.detach(), *torch.autograd.grad(y, (x, weight), dy.double())


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
    actual = sum_rows(buffer)
    assert_rounded(actual, torch.stack(expected), 8)
    assert torch.equal(sum_rows(buffer, BF16), actual.to(BF16))
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
