"""The comparison itself: what it must refuse, and what it must let pass."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tinyllama.harness.check.compare import Reference, compare

pytestmark = pytest.mark.quick


def rounded(
    seed: int = 0, dtype: torch.dtype = torch.float32, eager_error: float = 1.0
) -> tuple[Reference, torch.Tensor]:
    """A reference, and another honest rounding of its oracle; eager's error can be multiplied."""
    generator = torch.Generator().manual_seed(seed)
    oracle = torch.randn(16, 64, dtype=torch.float64, generator=generator)
    eps = torch.finfo(dtype).eps

    def noisy() -> torch.Tensor:
        return oracle * (1 + eps * (torch.rand(oracle.shape, generator=generator) - 0.5))

    eager, second = noisy().to(dtype), noisy().to(dtype)
    eager = (oracle + (eager.double() - oracle) * eager_error).to(dtype)
    return Reference(eager, oracle, [noisy() for _ in range(8)]), second


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_honest_rounding_passes(dtype: torch.dtype) -> None:
    for seed in range(20):
        reference, honest = rounded(seed, dtype)
        assert compare("y", honest, reference).passed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda y: torch.zeros_like(y), id="zeros"),
        pytest.param(lambda y: y * 1.01, id="scaled by 1.01"),
        pytest.param(lambda y: y * 0.99, id="scaled by 0.99"),
        pytest.param(lambda y: -y, id="sign"),
        pytest.param(lambda y: y.roll(1, 0), id="rows moved"),
        pytest.param(lambda y: y.index_fill(0, torch.tensor([15]), 0.0), id="last row missing"),
        pytest.param(lambda y: y.index_fill(0, torch.tensor([3]), float("nan")), id="one NaN row"),
        pytest.param(lambda y: y.index_fill(1, torch.tensor([63]), float("inf")), id="infinities"),
    ],
)
def test_a_wrong_result_fails(
    wrong: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    reference, _ = rounded(dtype=dtype)
    assert not compare("y", wrong(reference.oracle.clone()).to(dtype), reference).passed


def test_a_small_row_is_not_lost_beside_large_ones() -> None:
    reference, honest = rounded()
    eager, oracle, perturbed = reference.eager, reference.oracle, reference.perturbed
    scale = torch.ones(16, 1, dtype=torch.float64)
    scale[5] = 1e-9
    scaled = Reference((eager * scale).float(), oracle * scale, [p * scale for p in perturbed])
    wrong = (honest * scale).float()
    assert compare("y", wrong, scaled).passed
    wrong[5] = 0.0
    comparison = compare("y", wrong, scaled)
    assert [check.norm for check in comparison.checks if not check.passed] == ["row"]


@pytest.mark.parametrize(("times", "passed"), [(1.0, True), (3.0, True), (4.0, False)])
def test_an_error_may_be_three_times_eagers_and_not_four(times: float, passed: bool) -> None:
    """Over a whole tensor, where chance hardly widens the bound."""
    reference, _ = rounded(eager_error=100)
    error = reference.eager.double() - reference.oracle
    result = reference.oracle + error.roll(1, 0) * times
    total, *_ = compare("y", result.float(), reference).checks
    assert total.norm == "tensor"
    assert total.passed is passed


def test_a_result_that_is_exactly_zero() -> None:
    zero = torch.zeros(4, 8, dtype=torch.float64)
    exact = Reference(zero.float(), zero, [zero] * 8)
    assert compare("y", zero.float(), exact).passed
    assert not compare("y", zero.float() + 1e-30, exact).passed
    cancelled = replace(exact, magnitude=torch.ones_like(zero))
    assert compare("y", zero.float() + 1e-8, cancelled).passed
    assert not compare("y", zero.float() + 1e-5, cancelled).passed


@pytest.mark.parametrize(
    ("result", "off_by", "passed"),
    [
        ([5, 6, 7, 0], 0, True),  # as the oracle
        ([5, 6, 8, 0], 0, True),  # as eager
        ([4, 6, 7, 0], 0, False),
        ([4, 6, 7, 0], 1, True),
        ([3, 6, 7, 0], 1, False),
        ([4, 7, 6, 1], 1, False),  # more of them than three times as often as eager
    ],
)
def test_integers_are_equal_or_off_by_what_is_declared(
    result: list[int], off_by: int, passed: bool
) -> None:
    oracle, eager = torch.tensor([5, 6, 7, 0]), torch.tensor([5, 6, 8, 0])
    reference = Reference(eager, oracle, [oracle, oracle], off_by=off_by)
    assert compare("y", torch.tensor(result), reference).passed is passed


@pytest.mark.parametrize(
    ("error", "tells"),
    [
        pytest.param(lambda row: row.fill_(1e-8), True, id="of a rounding"),
        pytest.param(lambda row: row.fill_(1.5e-6), False, id="of more than any row's"),
        pytest.param(lambda row: row.fill_(math.nan), False, id="NaN"),
        pytest.param(lambda row: row, None, id="none"),
    ],
)
def test_a_wrong_row_of_zeros_may_be_terms_that_cancel(
    error: Callable[[torch.Tensor], object], tells: bool | None
) -> None:
    few, honest = rounded()
    # Of many rows, a single one may be wrong by several times the widest and not show in the norm.
    eager, oracle, result, *moved = (
        tensor.repeat(64, 1) for tensor in (few.eager, few.oracle, honest, *few.perturbed)
    )
    for tensor in (eager, oracle, result, *moved):
        tensor[3] = 0
    error(result[3])
    comparison = compare("y", result, Reference(eager, oracle, moved))
    assert comparison.passed is (tells is None)
    assert ("if terms of a sum cancel in this row" in str(comparison)) is bool(tells)
