"""A scan of an interpreted kernel rounds as on a device: in a tree, in its own type. So does any
function that combines parts. Extremes of NaN are as there, and torch's default device changes
nothing."""

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


@jit
def recur(a, b, c, d):  # type: ignore[no-untyped-def]
    return a * c, c * b + d


@jit
def recur_without_product(a, b, c, d):  # type: ignore[no-untyped-def]
    return c, c * b + d


@jit
def welford(mean, square, count, mean2, square2, count2):  # type: ignore[no-untyped-def]
    apart, n = mean2 - mean, count + count2
    square += square2 + apart * apart * count * count2 / n
    return mean + apart * count2 / n, square, n


@jit
def welford_of_one(mean, square, count, mean2, square2, count2):  # type: ignore[no-untyped-def]
    apart, n = mean2 - mean, count + 1
    return mean + apart / n, square + square2 + apart * apart * count / n, n


@jit
def combine(x, factors, scans, sums, SCAN: tl.constexpr, REDUCE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, 4)[:, None] * 8 + tl.arange(0, 8)[None, :]
    a, one = tl.load(x + at), tl.full([4, 8], 1.0, tl.float32)
    _, forward = tl.associative_scan((tl.load(factors + at), a), 1, SCAN)
    _, backward = tl.associative_scan((tl.load(factors + at), a), 0, SCAN, reverse=True)
    tl.store(scans + at, forward)
    tl.store(scans + 32 + at, backward)
    _, rows, _ = tl.reduce((a, 0 * a, one), 1, REDUCE)
    tl.store(sums + tl.arange(0, 4), rows)
    _, columns, _ = tl.reduce((a, 0 * a, one), 0, REDUCE, keep_dims=True)
    tl.store(sums + 4 + tl.arange(0, 8)[None, :], columns)
    _, every, _ = tl.reduce((a, 0 * a, one), None, REDUCE)
    tl.store(sums + 12, every)


@pytest.mark.parametrize("associative", [True, False])
def test_a_function_combines_parts_of_a_row(associative: bool) -> None:
    made = torch.Generator().manual_seed(0)
    x, factors = torch.randn(4, 8, generator=made), torch.rand(4, 8, generator=made)
    scans, sums = torch.zeros(2, 4, 8), torch.zeros(13)
    functions = (recur, welford) if associative else (recur_without_product, welford_of_one)
    combine[(1,)](x, factors, scans, sums, SCAN=functions[0], REDUCE=functions[1])
    right = torch.zeros(2, 4, 8)
    for t in range(8):
        right[0, :, t] = x[:, t] + (factors[:, t] * right[0, :, t - 1] if t else 0)
    for t in (3, 2, 1, 0):
        right[1, t] = x[t] + (factors[t] * right[1, t + 1] if t < 3 else 0)
    squares = [x.var(axis, correction=0) * n for axis, n in ((1, 8), (0, 4), ((0, 1), 32))]
    every = torch.cat([one.flatten() for one in squares])
    for found, expected in ((scans[0], right[0]), (scans[1], right[1]), (sums, every)):
        assert torch.allclose(found, expected, atol=1e-5) is associative
