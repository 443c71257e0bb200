"""In which precision products are computed, and how operands are rounded to tf32."""

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tinyllama.harness.check.guards import GuardedMemory
from tinyllama.harness.kernels.bounds import watched
from tinyllama.harness.kernels.launch import jit, tl
from tinyllama.harness.kernels.tf32 import rounded_to_tf32, to_tf32
from tinyllama.ops.linear import rounding_kernels
from tinyllama.ops.linear.rounding_kernels import BLOCK

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


# -- tf32 -------------------------------------------------------------------------------------


@jit
def round_kernel(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, to_tf32(tl.load(x + at, mask=at < n)), mask=at < n)


def by_kernel(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    round_kernel[(-(-x.numel() // 256),)](x, y, x.numel(), BLOCK=256)
    return y


def expected(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """In float64 the nearest multiple of the unit of the last place (2^-10 of a number's power of
    two, 2^-136 below the normal numbers), the larger one of two that are equally near."""
    wide = np.abs(x.astype(np.float64))
    with np.errstate(invalid="ignore"):
        power = np.exp2(np.floor(np.log2(np.maximum(wide, 2.0**-126))))
        unit = np.where(np.isfinite(wide), power * 2.0**-10, 1.0)
        nearest = np.copysign(np.floor(wide / unit + 0.5) * unit, x)
    return np.where(np.abs(nearest) > 2.0**128 - 2.0**117, np.copysign(np.inf, x), nearest)


def values(device: torch.device) -> torch.Tensor:
    """Numbers of every size and sign, ties and their neighbours, denormals, the largest."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**31), 2**31, (1 << 14,), generator=generator).to(torch.int32)
    fractions = torch.arange(0, 1 << 15, 0x800, dtype=torch.int32)  # quarters of a unit
    near = torch.cat([fractions - 1, fractions, fractions + 1]).clamp_min(0)
    exponents = torch.tensor([0, 1, 100, 127, 200, 253], dtype=torch.int32) << 23
    edges = [0, 0x7F7FFFFF, 0x7F7FF000, 0x7F7FEFFF, 0x007FFFFF, 0x7F800000]
    near = (exponents[:, None] + near).flatten()
    bits = torch.cat([drawn, near, torch.tensor(edges, dtype=torch.int32)])
    numbers = torch.cat([bits, bits | -(2**31)]).view(FP32)
    return numbers[~numbers.isnan()].to(device)


@pytest.mark.parametrize("way", [by_kernel, rounded_to_tf32])
def test_the_nearest_number_away_from_zero_where_two_are_equally_near(
    way: Any, device: torch.device
) -> None:
    x = values(device)
    rounded = way(x)
    np.testing.assert_array_equal(rounded.cpu().double().numpy(), expected(x.cpu().numpy()))
    assert torch.equal(rounded.signbit(), x.signbit())
    assert not (rounded.view(torch.int32) & 0x1FFF).any(), "a matrix unit would cut it again"
    nan = torch.tensor([0x7FC00000, 0x7FFFFFFF, 0x7F800001, 0x7FFFF000, -1], dtype=torch.int32)
    assert way(nan.to(device).view(FP32)).isnan().all()


def test_an_operand_is_rounded_in_place_and_nothing_beside_it(device: torch.device) -> None:
    x = torch.randn(BLOCK + 3, generator=torch.Generator().manual_seed(0)).to(device)
    rounded, memory = rounded_to_tf32(x), GuardedMemory()
    with memory, watched(memory.watch):  # loads are seen where they are interpreted
        guarded = memory.guarded(x)
        rounding_kernels.round_kernel[(2,)](guarded, len(x), BLOCK=BLOCK, num_warps=4)
    assert torch.equal(guarded, rounded)
    assert not memory.broken()
