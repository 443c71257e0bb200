"""What the derived cases cannot ask of cross-entropy's kernels.

Targets that are no class; classes that are masked out; rows and targets anywhere; who owns memory.
"""

import math

import pytest
import torch

from tinyllama.harness.kernels.configs import Config
from tinyllama.ops import cross_entropy as cross_entropy_file
from tinyllama.ops.cross_entropy import kernels as cross_entropy_kernels
from tinyllama.ops.cross_entropy import loss_backward, loss_forward, losses_and_gradient, row_losses

pytest.importorskip("triton")


def test_a_target_that_is_no_class_gives_nan_and_reads_nothing(device: torch.device) -> None:
    logits = torch.randn(5, 33, device=device)
    targets = torch.tensor([0, -1, 33, 2**40, 32], device=device)
    unknown = [False, True, True, True, False]
    loss_N, statistics = row_losses(logits, targets)
    assert loss_N.isnan().tolist() == unknown
    dlogits = loss_backward(logits, targets, statistics, torch.ones((), device=device))
    assert dlogits.isnan().all(-1).tolist() == unknown
    assert dlogits.isnan().any(-1).tolist() == unknown
    results = cross_entropy_file.losses_and_gradient(logits, targets, 0.5, loss_N)
    assert results.isnan().all(-1).tolist() == results.isnan().any(-1).tolist() == unknown


@pytest.mark.parametrize("shift", [0.0, 1.0, 100.0, 1e4])
@pytest.mark.parametrize("classes", [50, 4100])
def test_a_gradient_is_as_accurate_however_far_the_logits_are_from_zero(
    shift: float, classes: int, device: torch.device
) -> None:
    """Softmax sees differences alone: its error does not grow with the logits."""
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(6, classes, generator=generator) + shift).to(device)
    targets = torch.arange(6, device=device)
    exact = logits.double().softmax(-1)
    exact[targets, targets] -= 1
    _, statistics = row_losses(logits, targets)
    actual = loss_backward(logits, targets, statistics, torch.full((), 6.0, device=device))
    loss_N = torch.empty(6, device=device)
    fused = cross_entropy_file.losses_and_gradient(logits, targets, 1.0, loss_N)
    for gradient in (actual, fused):
        error = (gradient.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
        assert error.max() < 4 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("mean", [0.0, -500.0])
def test_classes_that_are_masked_out(mean: float, device: torch.device) -> None:
    """Logits of -inf, a whole block of them first: it has no maximum, 0 neither."""
    logits = mean + torch.randn(2, 4100, device=device)
    logits[:, :4097] = -math.inf
    targets = torch.tensor([4097, 4099], device=device)
    loss, statistics = loss_forward(logits, targets)
    few = logits[:, 4097:].contiguous()
    expected, _ = loss_forward(few, targets - 4097)
    torch.testing.assert_close(loss, expected)
    gradient = loss_backward(logits, targets, statistics, torch.ones((), device=device))
    assert not gradient[:, :4097].any()
    gradients = torch.empty_like(logits)
    loss_N = torch.empty(2, device=device)
    cross_entropy_file.losses_and_gradient(logits, targets, 0.5, loss_N, gradients)
    torch.testing.assert_close(loss_N.mean(), loss)
    torch.testing.assert_close(gradients, gradient)


def test_rows_and_targets_anywhere(device: torch.device) -> None:
    torch.manual_seed(0)
    wide = torch.randn(6, 50, device=device)
    spread = torch.randint(33, (12,), device=device)
    expected, statistics = loss_forward(wide[::2, 4:37].contiguous(), spread[::4].contiguous())
    loss, same_N = loss_forward(wide[::2, 4:37], spread[::4])
    # Rows that begin anywhere are loaded in other widths, and summed in another order.
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(same_N, statistics, rtol=1e-6, atol=0)
    dloss = torch.ones((), device=device)
    gradient = loss_backward(
        wide[::2, 4:37].contiguous(), spread[::4].contiguous(), statistics, dloss
    )
    before = wide.clone()
    into = wide[::2, 4:37]
    loss_backward(into, spread[::4], statistics, dloss, out_NV=into)
    torch.testing.assert_close(into, gradient)
    before[::2, 4:37] = into.clone()
    assert torch.equal(wide, before), "nothing beside them is written"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_in_place_gives_the_same_bits(dtype: torch.dtype, device: torch.device) -> None:
    logits = torch.randn(4, 5000, device=device).to(dtype)
    targets = torch.tensor([0, 4095, 4096, 4999], device=device)
    _, statistics = loss_forward(logits, targets)
    dloss = torch.tensor(0.7, device=device)
    expected = loss_backward(logits, targets, statistics, dloss)
    assert loss_backward(logits, targets, statistics, dloss, out_NV=logits) is logits
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("V", [127, 128, 129, 192])
def test_a_row_of_several_blocks_is_read_whole_the_second_time(
    V: int, device: torch.device
) -> None:
    """From its end, whether the last block is full or not."""
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(1)).to(device)
    targets = torch.tensor([0, 64, V - 1], device=device)
    exact = torch.softmax(logits.double(), -1)
    exact[range(3), targets] -= 1
    key = cross_entropy_kernels._key(logits)
    with cross_entropy_kernels.BOTH.force(Config(BLOCK=64, num_warps=1), **key):
        losses_and_gradient(logits, targets, 1.0, torch.empty(3, device=device))
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("BLOCK", [64, 1024])
def test_true_class_keeps_its_gradient_at_any_block(BLOCK: int, device: torch.device) -> None:
    """p = 0.999, in one block and in several: p - 1 to the last bits that p itself has."""
    generator = torch.Generator().manual_seed(1)
    logits = cross_entropy_file.confident((3, 1000), generator).float().to(device)
    targets = torch.zeros(3, dtype=torch.int64, device=device)
    exact = torch.softmax(logits.double(), -1)[:, 0] - 1
    loss_N = torch.empty(3, device=device)
    key = cross_entropy_kernels._key(logits)
    with cross_entropy_kernels.BOTH.force(Config(BLOCK=BLOCK, num_warps=1), **key):
        cross_entropy_file.losses_and_gradient(logits, targets, 1.0, loss_N)
    error = (logits[:, 0].double() - exact).abs().max()
    assert error <= 4 * torch.finfo(torch.float32).eps
