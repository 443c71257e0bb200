"""What the derived cases cannot ask of the activation: halves of a buffer, cancellation."""

import pytest
import torch

from correctness_tests.support.rounding import assert_rounded, randn
from tinyllama.harness.kernels import layout
from tinyllama.ops.silu_mul import activate, activate_backward
from tinyllama.ops.swiglu import swiglu

pytest.importorskip("triton")

FP32 = torch.float32


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
    actual = torch.full_like(packed, torch.nan)
    again = torch.full((N, F + 3), torch.nan, device=device)[:, :F]
    dgate, dup = actual.chunk(2, -1)
    activate_backward(dh, gate, up, dgate, dup, again)
    assert layout.copies == copies
    assert torch.equal(again, activate(gate, up)), "h made again is not h"
    for got, gradient in zip(actual.chunk(2, -1), expected, strict=True):
        assert_rounded(got, gradient, 8)
    in_two_buffers = torch.full((N, 3 * F), torch.nan, device=device)[:, :F], torch.empty_like(dh)
    # every tensor with a stride of its own
    activate_backward(dh, gate, up.contiguous(), *in_two_buffers)
    assert torch.equal(torch.cat(in_two_buffers, -1), actual)
    activate_backward(dh, gate, up, gate, up)  # in place
    assert torch.equal(packed, actual)


def test_activation_neither_overflows_nor_cancels(device: torch.device) -> None:
    gate = torch.tensor(
        [[-1e30, -200.0, -90.0, -20.0, 0.0, 20.0, 90.0, 200.0, 1e30]], device=device
    )
    ones, buffers = torch.ones_like(gate), [torch.empty_like(gate) for _ in range(3)]
    activate_backward(ones, gate, ones, *buffers)
    exact = gate.double().requires_grad_()
    h = torch.nn.functional.silu(exact)
    (dgate,) = torch.autograd.grad(h.sum(), exact)
    tiny = torch.finfo(FP32).tiny  # below it a GPU may give zero
    torch.testing.assert_close(buffers[0].double(), dgate, rtol=1e-5, atol=tiny)
    torch.testing.assert_close(buffers[1].double(), h.detach(), rtol=1e-5, atol=tiny)
    torch.testing.assert_close(buffers[2].double(), h.detach(), rtol=1e-5, atol=tiny)


@pytest.mark.parametrize("provider", ["triton", "naive"])
def test_weights_side_by_side_give_the_same_result(provider: str, device: torch.device) -> None:
    x, weights = randn(2, 3, 20, device=device), randn(2 * 12, 20, device=device, seed=1)
    results = []
    for parts in (weights.chunk(2), [half.clone() for half in weights.chunk(2)]):
        leaves = [leaf.detach().requires_grad_() for leaf in (x, *parts)]
        h = swiglu(*leaves, provider=provider)
        results.append([h, *torch.autograd.grad(h.sin().sum(), leaves)])
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right)
