"""The products of a projection's backward pass, whose operands may be transposed first."""

from collections.abc import Iterator

import pytest
import torch

from tinyllama.harness.kernels.configs import Config
from tinyllama.harness.kernels.launch import recorded
from tinyllama.ops import linear as linear_file
from tinyllama.ops.linear import INPUT_GRADIENT, WEIGHT_GRADIENT, input_gradient, weight_gradient
from tinyllama.ops.transpose import transposed

pytest.importorskip("triton")
N, WIDE, NARROW = 70, 40, 33
TURN = Config(TURN=1)


@pytest.fixture
def turning(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Products count as tf32, and every operand that may be transposed is."""
    monkeypatch.setattr(linear_file, "input_precision", lambda x: "tf32")
    with WEIGHT_GRADIENT.force(TURN, longer=64), INPUT_GRADIENT.force(TURN, inner=64, rows=128):
        yield


def random(*shape: int, device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device)


@pytest.mark.parametrize(("out", "inner"), [(WIDE, NARROW), (NARROW, WIDE), (WIDE, WIDE)])
def test_the_narrower_operand_is_transposed_and_the_product_is_the_same(
    out: int, inner: int, turning: None, device: torch.device
) -> None:
    dy, x = random(N, out, device=device), random(N, inner, device=device)
    exact = dy.double().T @ x.double()
    actual = weight_gradient(dy, x, torch.float32)
    assert actual.shape == (out, inner)
    assert (actual.double() - exact).norm() < 1e-6 * exact.norm()
    with recorded() as launches:
        weight_gradient(dy, x, torch.float32)
    (launch,) = launches
    assert launch.arguments["x"] is (x if inner <= out else dy)


def test_the_weight_is_transposed_for_an_inputs_gradient(
    turning: None, device: torch.device
) -> None:
    dy, w = random(N, WIDE, device=device), random(WIDE, NARROW, device=device)
    exact = dy.double() @ w.double()
    actual = input_gradient(dy, w)
    assert actual.shape == (N, NARROW)
    assert (actual.double() - exact).norm() < 1e-6 * exact.norm()
    with recorded() as launches:
        input_gradient(dy, w)
    assert [launch.arguments["x"] for launch in launches] == [w]


@pytest.mark.parametrize("shape", [(1, 1), (5, 200), (200, 5), (0, 3), (3, 0)])
def test_a_transpose_of_rows_that_lie_apart(shape: tuple[int, int], device: torch.device) -> None:
    room = random(shape[0], shape[1] + 7, device=device)
    x = room[:, 3 : 3 + shape[1]]
    actual = transposed(x)
    assert actual.is_contiguous()
    assert torch.equal(actual, x.T)
