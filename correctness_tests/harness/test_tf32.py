"""Rounding to tf32, in a kernel and in torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tinyllama.harness.check.guards import GuardedMemory, watched
from tinyllama.harness.kernels.launch import HAS_DESCRIPTORS, described, jit, tl
from tinyllama.harness.kernels.tf32 import descriptors_round, rounded_to_tf32, to_tf32
from tinyllama.ops.linear import rounding_kernels
from tinyllama.ops.linear.rounding_kernels import BLOCK


@jit
def round_kernel(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, to_tf32(tl.load(x + at, mask=at < n)), mask=at < n)


def by_kernel(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    round_kernel[(-(-x.numel() // 256),)](x, y, x.numel(), BLOCK=256)
    return y


WAYS = [by_kernel, rounded_to_tf32]
# The unit of a number's last place in tf32: 2^-10 of its power of two, or 2^-136 below the normal
# numbers.
LARGEST = 2.0**128 - 2.0**117


def expected(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The nearest multiple of the unit in float64, the larger one of two that are equally near."""
    wide = np.abs(x.astype(np.float64))
    with np.errstate(invalid="ignore"):
        power = np.exp2(np.floor(np.log2(np.maximum(wide, 2.0**-126))))
        unit = np.where(np.isfinite(wide), power * 2.0**-10, 1.0)
        nearest = np.copysign(np.floor(wide / unit + 0.5) * unit, x)
    return np.where(np.abs(nearest) > LARGEST, np.copysign(np.inf, x), nearest)


def values(device: torch.device) -> torch.Tensor:
    """Numbers of every size and sign, ties and their neighbours, denormals, the largest."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**31), 2**31, (1 << 14,), generator=generator).to(torch.int32)
    fractions = torch.arange(0, 1 << 15, 0x800, dtype=torch.int32)  # quarters of a unit
    near = torch.cat([fractions - 1, fractions, fractions + 1]).clamp_min(0)
    exponents = torch.tensor([0, 1, 100, 127, 200, 253], dtype=torch.int32) << 23
    chosen = (exponents[:, None] + near[None, :]).flatten()
    edges = [0, 0x7F7FFFFF, 0x7F7FF000, 0x7F7FEFFF, 0x007FFFFF, 0x7F800000]
    bits = torch.cat([drawn, chosen, torch.tensor(edges, dtype=torch.int32)])
    found = torch.cat([bits, bits | -(2**31)]).view(torch.float32)
    return found[~found.isnan()].to(device)


@pytest.mark.parametrize("way", WAYS)
def test_the_nearest_number_away_from_zero_where_two_are_equally_near(
    way: Any, device: torch.device
) -> None:
    x = values(device)
    found = way(x)
    np.testing.assert_array_equal(found.cpu().double().numpy(), expected(x.cpu().numpy()))
    assert torch.equal(found.signbit(), x.signbit())
    assert torch.equal(way(found), found), "twice is not once"
    assert not (found.view(torch.int32) & 0x1FFF).any(), "a matrix unit would cut it again"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0x7F800001, 0x7FFFF000])
def test_nan_stays_nan(bits: int, way: Any, device: torch.device) -> None:
    """The last has a fraction that overflows into the sign when half a unit is added."""
    x = torch.tensor([bits, bits - 2**31], dtype=torch.int64).to(torch.int32).to(device)
    assert way(x.view(torch.float32)).isnan().all()


def test_an_operand_is_rounded_in_place_and_nothing_beside_it(device: torch.device) -> None:
    x = torch.randn(BLOCK + 3, generator=torch.Generator().manual_seed(0)).to(device)
    expected, memory = rounded_to_tf32(x), GuardedMemory()
    with memory, watched(memory.watch):  # loads are seen where they are interpreted
        found = memory.guarded(x)
        rounding_kernels.round_kernel[(2,)](found, len(x), BLOCK=BLOCK, num_warps=4)
    assert torch.equal(found, expected)
    assert not memory.broken()


def test_errors_cancel_where_cutting_has_one_sign(device: torch.device) -> None:
    x = torch.rand(1 << 16, generator=torch.Generator().manual_seed(0)).to(device) + 1
    cut = (x.view(torch.int32) & -0x2000).view(torch.float32)
    bias = [((y - x).double().mean() / x.double().mean()).item() for y in (cut, by_kernel(x))]
    assert bias[0] == pytest.approx(-(2**-11) / 1.5, rel=0.02)
    assert abs(bias[1]) < 2**-11 / 100


# -- descriptors ----------------------------------------------------------------------------------

if HAS_DESCRIPTORS:
    pass


@jit
def copy_kernel(x, y, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(y + at, x.load([0, 0]))


def loaded(x: torch.Tensor, *, rounds: bool) -> torch.Tensor:
    y = torch.empty_like(x)
    copy_kernel[(1,)](described(x, x.shape, to_tf32=rounds), y, *x.shape)
    return y


def interpreted_loads_round() -> bool:
    """Whether the option changes anything on a CPU: the interpreter of triton 3.8 ignores it."""
    x = torch.full((16, 16), 1 + 2**-12)
    return not torch.equal(loaded(x, rounds=True), x)


def test_a_descriptor_s_loads_round(device: torch.device) -> None:
    """Where two numbers are equally near, either is right: products have no bias by ties."""
    if not descriptors_round():
        pytest.skip("descriptors of this triton have no option to round")
    if device.type == "cpu" and not interpreted_loads_round():
        pytest.skip("this triton's interpreter ignores that option of a descriptor")
    x = values(device)[: 64 * 64].view(64, 64)
    x = torch.where(x.abs() < torch.finfo(x.dtype).tiny, 1.25, x)
    x[0, 0], x[0, 1], x[0, 2] = float("nan"), float("inf"), -float("inf")
    nearest = rounded_to_tf32(x)
    tied = (x.view(torch.int32) & 0x1FFF) == 0x1000
    found = loaded(x, rounds=True)
    assert torch.equal(found.isnan(), x.isnan())
    torch.testing.assert_close(
        found[~tied], nearest[~tied], rtol=0, atol=0, equal_nan=True, check_stride=False
    )
    assert ((found - x).abs() <= (nearest - x).abs())[tied & x.isfinite()].all()
    assert torch.equal(loaded(x, rounds=False).view(torch.int32), x.view(torch.int32))
