"""The comparison itself: what it must refuse, and what it must let pass."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tinyllama.harness.check.compare import Reference, compare
from tinyllama.harness.declare.specs import Terms

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

    eager, other = noisy().to(dtype), noisy().to(dtype)
    eager = (oracle + (eager.double() - oracle) * eager_error).to(dtype)
    return Reference(eager, oracle, [noisy() for _ in range(8)]), other


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_honest_rounding_passes(dtype: torch.dtype) -> None:
    for seed in range(20):
        reference, other = rounded(seed, dtype)
        assert compare("y", other, reference).passed


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
    reference, other = rounded()
    eager, oracle, perturbed = reference.eager, reference.oracle, reference.perturbed
    scale = torch.ones(16, 1, dtype=torch.float64)
    scale[5] = 1e-9
    scaled = Reference((eager * scale).float(), oracle * scale, [p * scale for p in perturbed])
    wrong = (other * scale).float()
    assert compare("y", wrong, scaled).passed
    wrong[5] = 0.0
    found = compare("y", wrong, scaled)
    assert [check.norm for check in found.checks if not check.passed] == ["row"]


def test_the_bound_follows_eager_and_not_a_constant() -> None:
    """Where eager is a hundred times worse, so may others be; where it is not, they may not."""
    reference, other = rounded()
    worse = (reference.oracle + (other.double() - reference.oracle) * 100).float()
    assert not compare("y", worse, reference).passed
    assert compare("y", worse, rounded(eager_error=100)[0]).passed


@pytest.mark.parametrize(("times", "passed"), [(1.0, True), (3.0, True), (4.0, False)])
def test_an_error_may_be_three_times_eagers_and_not_four(times: float, passed: bool) -> None:
    """Over a whole tensor, where chance hardly widens the bound."""
    reference, _ = rounded(eager_error=100)
    error = reference.eager.double() - reference.oracle
    result = reference.oracle + error.roll(1, 0) * times
    whole, *_ = compare("y", result.float(), reference).checks
    assert whole.norm == "tensor"
    assert whole.passed is passed


@pytest.mark.parametrize(("times", "passed"), [(0.7, True), (1.5, False)])
def test_one_row_may_be_as_far_off_as_chance_makes_one_of_many(times: float, passed: bool) -> None:
    """Three times as far as the worst of 16 rows lies in one result of ten thousand."""
    reference, _ = rounded(eager_error=100)
    rows = (reference.eager.double() - reference.oracle).norm(dim=-1)
    result = reference.oracle.clone()
    likely = rows.square().mean().sqrt() * (1 + math.sqrt(2 * math.log(1e4 * 16)))
    result[5, :2] += times * 3 * likely / math.sqrt(2) * torch.tensor([1, -1])
    _, row, *_ = compare("y", result.float(), reference).checks
    assert row.norm == "row"
    assert row.passed is passed


def test_says_when_it_could_not_have_failed() -> None:
    """An eager result that is itself useless leaves nothing to compare others with."""
    reference, other = rounded()
    useless = replace(reference, eager=torch.zeros_like(reference.eager))
    for one, sees in ((reference, True), (useless, False)):
        found = compare("y", other, one)
        assert (found.sees_zero, found.sees_scale) == (sees, sees)


def test_where_a_factor_of_one_percent_passes_it_is_said() -> None:
    found = []
    for eager_error in (1.0, 10.0, 100.0):
        reference, _ = rounded(dtype=torch.bfloat16, eager_error=eager_error)
        scaled = compare("y", (1.01 * reference.oracle).to(torch.bfloat16), reference)
        found.append((scaled.passed, scaled.sees_scale))
    assert (True, True) not in found
    assert {passed for passed, _ in found} == {True, False}


def test_a_result_that_is_exactly_zero() -> None:
    zero = torch.zeros(4, 8, dtype=torch.float64)
    exact = Reference(zero.float(), zero, [zero] * 8)
    assert compare("y", zero.float(), exact).passed
    assert not compare("y", zero.float() + 1e-30, exact).passed
    cancelled = replace(exact, magnitude=torch.ones_like(zero))
    assert compare("y", zero.float() + 1e-8, cancelled).passed
    assert not compare("y", zero.float() + 1e-5, cancelled).passed


def test_an_error_beside_an_exact_zero_may_be_as_large_as_eagers() -> None:
    """Of a saturated softmax the gradient is zero, and eager's roundings may be huge."""
    zero, eager = torch.zeros(4, 8, dtype=torch.float64), torch.full((4, 8), 1e20)
    beside = Reference(eager, zero, [zero])
    assert compare("y", eager, beside).passed
    assert compare("y", torch.zeros(4, 8), beside).passed
    assert not compare("y", 10 * eager, beside).passed


def test_terms_are_rounded_to_the_dtype_in_which_they_are_held() -> None:
    zero = torch.zeros(4, 8, dtype=torch.float64)
    narrow = Reference(zero.bfloat16(), zero, [zero] * 8, torch.ones_like(zero))
    for held, off, passed in (
        (None, 1e-3, True),
        (torch.float32, 1e-3, False),
        (torch.float32, 1e-8, True),
        (torch.float16, 1e-3, True),
        (torch.float16, 1e-2, False),
    ):
        found = compare("y", zero.bfloat16() + off, replace(narrow, terms=Terms(held)))
        assert found.passed is passed, (held, off, str(found))
    exact = Reference(zero.float(), zero, [zero] * 8, torch.ones_like(zero))
    for held in (None, torch.bfloat16):  # which the result is never narrower than
        assert not compare("y", zero.float() + 1e-5, replace(exact, terms=Terms(held))).passed


@pytest.mark.parametrize(("times", "alone", "shared"), [(3, 1, 1), (10, 0, 1), (20, 0, 0)])
def test_one_rounding_that_all_elements_share_is_one_draw(
    times: int, alone: bool, shared: bool
) -> None:
    """Over the whole tensor: 1 and about 5.3 times the root mean square are allowed, three times;
    rows are allowed as much either way."""
    zero = torch.zeros(40, 8, dtype=torch.float64)
    reference = Reference(zero.float(), zero, [zero] * 8, torch.ones_like(zero))
    off = times * torch.finfo(torch.float32).eps / math.sqrt(12) * torch.ones(40, 8)
    assert compare("y", off, reference).checks[0].passed is bool(alone)
    assert compare("y", off, replace(reference, terms=Terms(None, True))).checks[0].passed is bool(
        shared
    )


@pytest.mark.parametrize(("factors", "alone", "shared"), [(1, 0, 1), (3, 0, 1), (320, 0, 0)])
def test_changes_that_elements_share_are_few_draws(factors: int, alone: bool, shared: bool) -> None:
    """So many independent factors, and a result five times as far off over the whole tensor as a
    change is."""
    generator = torch.Generator().manual_seed(0)
    eps = torch.finfo(torch.float32).eps
    oracle = torch.randn(40, 8, dtype=torch.float64, generator=generator)

    def change() -> torch.Tensor:
        drawn = torch.randn(factors, dtype=torch.float64, generator=generator)
        return eps * oracle * drawn.repeat(320 // factors + 1)[:320].view(40, 8)

    eager = oracle.float()
    reference = Reference(eager, oracle, [oracle + change() for _ in range(8)])
    typical = reference.moved.total / oracle.norm()
    off = oracle * (1 + 5 * typical)
    for terms, passed in ((Terms(), alone), (Terms(None, True), shared)):
        one = replace(reference, terms=terms)
        whole, *_ = compare("y", off, one, gain=1.0).checks
        assert whole.passed is bool(passed), (one.freedom, whole)
    assert replace(reference, terms=Terms(None, True)).freedom <= (4 * factors)


@pytest.mark.long
@pytest.mark.parametrize("shape", [(1, 64), (64,)], ids=str)
def test_a_single_row_may_be_off_by_a_factor_that_its_elements_share(
    shape: tuple[int, ...],
) -> None:
    """As its 1 / rms is rounded: eager's error is one draw. Without a second axis no element shares
    it, and then the bound over the whole is the strict one."""
    generator = torch.Generator().manual_seed(0)
    eps, refused = torch.finfo(torch.float32).eps, 0

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    for _ in range(300):
        oracle = drawn(*shape)
        result, eager = (
            (oracle * (1 + eps * drawn(1)) * (1 + eps / 4 * drawn(*shape))).float()
            for _ in range(2)
        )
        perturbed = [oracle * (1 + eps / 4 * drawn(*shape)) for _ in range(8)]
        refused += not compare("y", result, Reference(eager, oracle, perturbed)).passed
        assert not compare("y", 1.01 * result, Reference(eager, oracle, perturbed)).passed
    assert refused == 0 if len(shape) > 1 else refused > 0


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
    few, other = rounded()
    # Of many rows, a single one may be wrong by several times the widest and not show in the norm.
    eager, oracle, result, *moved = (
        one.repeat(64, 1) for one in (few.eager, few.oracle, other, *few.perturbed)
    )
    for one in (eager, oracle, result, *moved):
        one[3] = 0
    error(result[3])
    found = compare("y", result, Reference(eager, oracle, moved))
    assert found.passed is (tells is None)
    assert ("if terms of a sum cancel in this row" in str(found)) is bool(tells)
