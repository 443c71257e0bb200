"""A scan of an interpreted kernel rounds as on a device: in a tree, in its own type. Extremes of
NaN are as there, and torch's default device changes nothing."""

import pytest
import torch

pytest.importorskip("triton")

from tinyllama.harness.kernels.bounds import Bounds, watched
from tinyllama.harness.kernels.launch import jit, tl

pytestmark = pytest.mark.quick


@jit
def scans(x, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    a = tl.load(x + at)
    tl.store(out + at, tl.cumsum(a, 1))
    tl.store(out + ROWS * COLUMNS + at, tl.cumsum(a, 1, reverse=True))
    tl.store(out + 2 * ROWS * COLUMNS + at, tl.cumsum(a, 0))


def scanned(x: torch.Tensor) -> torch.Tensor:
    out = x.new_zeros(3, *x.shape)
    scans[(1,)](x, out, ROWS=x.shape[0], COLUMNS=x.shape[1])
    return out


def test_a_scan_has_the_accuracy_of_a_tree() -> None:
    """One element after the other, the error of 8192 sums is 9 times as large."""
    x = 1 + 1e-3 * torch.randn(2, 8192, generator=torch.Generator().manual_seed(0))
    wide = x.double()
    exact = [wide.cumsum(1), wide.flip(1).cumsum(1).flip(1), wide.cumsum(0)]
    for found, right in zip(scanned(x), exact, strict=True):
        assert (found.double() - right).norm() < 2**-24 * right.norm()


def test_a_scan_of_float16_rounds_each_sum() -> None:
    x = torch.full((1, 4096), 1.0, dtype=torch.float16)
    assert scanned(x)[0, 0, -1] == 4096, "added one by one, it stays at 2048"


@jit
def extremes(x, out, places, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    a = tl.load(x + tl.arange(0, SIZE))
    tl.store(out, tl.max(a, 0))
    tl.store(out + 1, tl.min(a, 0))
    tl.store(places, tl.argmax(a, 0))
    tl.store(places + 1, tl.argmin(a, 0))


def test_extremes_ignore_nan_and_are_nan_where_there_is_nothing_else() -> None:
    for x, right, where in (
        ([float("nan")] * 4, [float("nan")] * 2, [0, 0]),
        ([float("nan"), 2.0, 3.0, -1.0], [3.0, -1.0], [2, 3]),
        ([-float("inf")] * 4, [-float("inf")] * 2, [0, 0]),
    ):
        out, places = torch.zeros(2), torch.zeros(2, dtype=torch.int32)
        extremes[(1,)](torch.tensor(x), out, places, SIZE=4)
        torch.testing.assert_close(out, torch.tensor(right), equal_nan=True)
        assert places.tolist() == where


def test_a_launch_makes_nothing_on_the_default_device() -> None:
    """Where accesses are watched, the interpreter makes tensors of its own."""
    x, out = torch.ones(2, 4), torch.zeros(3, 2, 4)
    with watched(Bounds().watch), torch.device("meta"):
        scans[(1,)](x, out, ROWS=2, COLUMNS=4)
    assert out[2, 1].tolist() == [2.0] * 4
