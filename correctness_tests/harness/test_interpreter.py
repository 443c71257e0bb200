"""An interpreted kernel computes what a compiled one does, and still compiles."""

import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tinyllama.harness.kernels.bounds import Bounds, watched
from tinyllama.harness.kernels.interpreter import limited
from tinyllama.harness.kernels.launch import jit, recorded, tl
from tinyllama.harness.kernels.resources import compilation, lacking

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
PATTERNS = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(BF16)
# Halfway between two bfloat16 and beside, at the ends of normal and subnormal numbers, and beyond.
EDGES = [0.0, -0.0, 1.00390625, 1.01171875, -1.00390625, 1.0039063692092896, 1.003906011581421]
EDGES += [3.3895313892515355e38, 3.3961775292304601e38, 3.4028234663852886e38, 1.17549435e-38]
EDGES += [9.183549615799121e-41, 4.591774807899561e-41, 1.3775324423698682e-40, math.inf, math.nan]


def draw(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (values if dtype.is_floating_point else 40 * values).to(dtype)


def assert_same(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bit for bit (the sign of zero too), where not NaN in both."""
    assert result.dtype is expected.dtype
    assert torch.equal(result.isnan(), expected.isnan())
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[result.element_size()]
    numbers = ~expected.isnan()
    assert torch.equal(result[numbers].view(bits), expected[numbers].view(bits))


@jit
def copy(x, y, n, OTHER: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n, other=OTHER))


def copied(x: torch.Tensor, dtype: torch.dtype, n: int | None = None, other: float = 0) -> Any:
    y = torch.zeros(-(-x.numel() // 256) * 256, dtype=dtype)
    copy[(len(y) // 256,)](x, y, x.numel() if n is None else n, OTHER=other, BLOCK=256)
    return y[: x.numel()]


def test_each_bfloat16_is_read_and_written_and_float32_is_rounded_to_nearest() -> None:
    assert_same(copied(PATTERNS, BF16), PATTERNS)
    assert_same(copied(PATTERNS, FP32), PATTERNS.float())
    random = torch.randint(-(2**31), 2**31, (1 << 14,), generator=torch.Generator().manual_seed(0))
    values = torch.cat((torch.tensor(EDGES), random.to(torch.int32).view(FP32)))
    assert_same(copied(values, BF16), values.bfloat16())
    assert_same(copied(values, FP16), values.half())  # what overflows is infinite, unwarned


@pytest.mark.parametrize("other", [1.5, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_masked_elements_have_the_value_of_other(other: float, dtype: torch.dtype) -> None:
    x = draw(16, dtype=dtype)
    expected = torch.cat((x[:10], torch.full((6,), other, dtype=dtype)))
    assert_same(copied(x, dtype, 10, other), expected)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool, torch.int16], ids=str)
def test_elements_of_any_size_are_addressed(dtype: torch.dtype) -> None:
    """Also where accesses are watched, which notes the tensor in the bits above an address."""
    x = (torch.arange(257) % 3 - 1).to(dtype)
    for start, context in itertools.product((0, 1), (nullcontext, lambda: watched(Bounds().watch))):
        with context():
            assert torch.equal(copied(x[start:][:256], dtype), x[start:][:256])


@jit
def arithmetic(x, y, out, n, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    a = tl.load(x + at)
    b = tl.load(y + at)
    tl.store(out + at, a + b)
    tl.store(out + n + at, a - b)
    tl.store(out + 2 * n + at, a * b)
    tl.store(out + 3 * n + at, tl.maximum(a, b))
    tl.store(out + 4 * n + at, tl.where(a > b, a, -b))
    tl.store(out + 5 * n + at, a * b + a)
    tl.store(out + 6 * n + at, 3 - a)
    tl.store(out + 7 * n + at, (a.to(tl.float32) * factor).to(x.dtype.element_ty))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, torch.int32, torch.int8], ids=str)
def test_each_operation_is_rounded_to_its_dtype_at_each_call(dtype: torch.dtype) -> None:
    """The first operation on operands of two types is Triton's own, later ones are remembered."""
    for seed in range(3):
        a, b = draw(256, dtype=dtype, seed=seed), draw(256, dtype=dtype, seed=seed + 9)
        out = torch.zeros(8, 256, dtype=dtype)
        arithmetic[(1,)](a, b, out, 256, 0.1, BLOCK=256)  # 0.1: a float32, as compiled
        expected = [a + b, a - b, a * b, torch.maximum(a, b), torch.where(a > b, a, -b), a * b + a]
        expected += [3 - a, (a.float() * torch.tensor(0.1)).to(dtype)]
        assert_same(out, torch.stack(expected))


@jit
def reductions(x, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    rows = tl.arange(0, ROWS)
    a = tl.load(x + rows[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :])
    tl.store(out + rows, tl.sum(a.to(tl.float32), 1))
    tl.store(out + ROWS + rows, tl.max(a, 1))
    tl.store(out + 2 * ROWS + rows, tl.min(a, 1))


def test_reductions_are_of_values() -> None:
    a, out = draw(8, 64), torch.zeros(3, 8)
    a[0, 3] = math.nan
    reductions[(1,)](a, out, ROWS=8, COLUMNS=64)
    torch.testing.assert_close(out[0, 1:], a[1:].float().sum(1))
    assert out[1, 0] == a[0].nan_to_num(-9).max(), "a maximum leaves out NaN, as on a device"
    assert torch.equal(out[1:, 1:], torch.stack((a.amax(1), a.amin(1)))[:, 1:].float())


@jit
def product(x, y, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]
    m = tl.arange(0, M)[:, None]
    n = tl.arange(0, N)[None, :]
    a = tl.load(x + m * K + tl.arange(0, K)[None, :])
    b = tl.load(y + tl.arange(0, K)[:, None] * N + n)
    tl.store(out + m * N + n, tl.dot(a, b, input_precision="ieee"))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_a_product_is_rounded_once_wherever_its_terms_stand(dtype: torch.dtype) -> None:
    """So that a product and that of the transposes agree: a backward pass relies on it."""
    a, b = draw(16, 128, dtype=dtype), draw(128, 64, dtype=dtype, seed=1)
    out, turned = torch.zeros(16, 64), torch.zeros(64, 16)
    product[(1,)](a, b, out, M=16, N=64, K=128)
    product[(1,)](b.T.contiguous(), a.T.contiguous(), turned, M=64, N=16, K=128)
    assert_same(out, (a.double() @ b.double()).float())
    assert torch.equal(out, turned.T)


@jit
def added(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.atomic_add(y + at % 4, tl.load(x + at), mask=at < n)


def test_atomics_on_bfloat16_round_each_sum() -> None:
    x, y, expected = draw(16), torch.zeros(32, dtype=BF16), torch.zeros(32, dtype=BF16)
    for _ in range(2):
        added[(1,)](x, y, 13, BLOCK=16)
        for place in range(13):  # torch rounds each sum to bfloat16, too
            expected[place % 4] += x[place]
    assert torch.equal(y, expected)


@jit
def doubled(x, TIMES: tl.constexpr):  # type: ignore[no-untyped-def]
    a = tl.load(x)
    for _ in range(TIMES):
        a = a + a
    tl.store(x, a)


def test_an_endless_loop_is_ended() -> None:
    x = torch.zeros(1)
    with limited(steps=100):
        doubled[(1,)](x, TIMES=50)
        with pytest.raises(Exception, match="more than 100 operations"):
            doubled[(1,)](x, TIMES=300)
    doubled[(1,)](x, TIMES=300)


# -- functions that a kernel calls, and what is left behind ------------------------------------


@jit
def squared(a):  # type: ignore[no-untyped-def]
    return a * a


@jit
def calls(x, y, n, BLOCK: tl.constexpr, FAULTY: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    a = tl.load(x + at, mask=at < n, other=0.0)
    once, twice = squared(a), squared(squared(a))
    tl.static_assert(not FAULTY, "a fault in a kernel")
    smooth = tl.sigmoid(once) + tl.softmax(twice)  # of triton's library, themselves under jit
    tl.store(y + at, smooth + tl.zeros((BLOCK,), tl.float32) + tl.cdiv(n, 2), mask=at < n)


def of_calls(make: Callable[..., torch.Tensor], faulty: bool = False) -> torch.Tensor:
    x, y = make(2, 32)
    calls[(1,)](x, y, 32, BLOCK=32, FAULTY=faulty)
    return y


def test_an_interpreted_kernel_compiles_afterwards_after_an_error_too() -> None:
    expected = torch.sigmoid(torch.ones(32)) + 1 / 32 + 16
    torch.testing.assert_close(of_calls(torch.ones), expected)
    with pytest.raises(Exception, match="a fault in a kernel"):
        of_calls(torch.ones, faulty=True)
    for chip in (chip for chip in ("gfx942", "sm_90") if not lacking(chip)):
        with recorded(chip) as launches:
            of_calls(lambda *shape: torch.empty(shape, device="meta"))
        assert compilation(launches[0], chip).run().registers
    torch.testing.assert_close(of_calls(torch.ones), expected)
