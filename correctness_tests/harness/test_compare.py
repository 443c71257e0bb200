"""The comparison itself: what it must refuse, and what it must let pass."""

from collections.abc import Callable

import pytest
import torch

from tinyllama.harness.correct.compare import Comparison, compare


def rounded(seed: int = 0, dtype: torch.dtype = torch.float32, rows: int = 16) -> tuple:
    """An oracle, two honest roundings of it, and perturbed oracles."""
    generator = torch.Generator().manual_seed(seed)
    oracle = torch.randn(rows, 64, dtype=torch.float64, generator=generator)
    eps = torch.finfo(dtype).eps

    def noisy() -> torch.Tensor:
        return oracle * (1 + eps * (torch.rand(oracle.shape, generator=generator) - 0.5))

    return oracle, noisy().to(dtype), noisy().to(dtype), [noisy() for _ in range(8)]


def judge(result: torch.Tensor, dtype: torch.dtype = torch.float32) -> Comparison:
    oracle, eager, _, perturbed = rounded(dtype=dtype)
    return compare("y", result.to(dtype), eager, oracle, perturbed)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_honest_rounding_passes(dtype: torch.dtype) -> None:
    for seed in range(20):
        oracle, eager, other, perturbed = rounded(seed, dtype)
        assert compare("y", other, eager, oracle, perturbed).passed


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
    oracle, _, other, _ = rounded(dtype=dtype)
    assert judge(other, dtype).passed
    assert not judge(wrong(oracle.clone()), dtype).passed


def test_a_small_row_is_not_lost_beside_large_ones() -> None:
    oracle, eager, other, perturbed = rounded()
    scale = torch.ones(16, 1, dtype=torch.float64)
    scale[5] = 1e-9
    moved = [p * scale for p in perturbed]
    wrong = (other * scale).float()
    assert compare("y", wrong, (eager * scale).float(), oracle * scale, moved).passed
    wrong[5] = 0.0
    found = compare("y", wrong, (eager * scale).float(), oracle * scale, moved)
    assert [check.norm for check in found.checks if not check.passed] == ["row"]


def test_the_bound_follows_eager_and_not_a_constant() -> None:
    """Where eager is a hundred times worse, so may others be; where it is not, they may not."""
    oracle, eager, other, perturbed = rounded()
    worse = oracle + (other.double() - oracle) * 100
    assert not compare("y", worse.float(), eager, oracle, perturbed).passed
    poor_eager = (oracle + (eager.double() - oracle) * 100).float()
    assert compare("y", worse.float(), poor_eager, oracle, perturbed).passed


@pytest.mark.parametrize(("times", "passed"), [(1.0, True), (3.0, True), (4.0, False)])
def test_an_error_may_be_three_times_eagers_and_not_four(times: float, passed: bool) -> None:
    """Over a whole tensor, where chance hardly widens the bound."""
    oracle, eager, _, perturbed = rounded()
    poor_eager = (oracle + (eager.double() - oracle) * 100).float()
    result = oracle + (poor_eager.double() - oracle).roll(1, 0) * times
    whole, *_ = compare("y", result.float(), poor_eager, oracle, perturbed).checks
    assert whole.norm == "tensor"
    assert whole.passed is passed


def test_says_when_it_could_not_have_failed() -> None:
    """An eager result that is itself useless leaves nothing to hold others to."""
    oracle, eager, other, perturbed = rounded()
    useless = compare("y", other, torch.zeros_like(eager), oracle, perturbed)
    assert not useless.sees_zero
    assert not useless.sees_scale
    useful = compare("y", other, eager, oracle, perturbed)
    assert useful.sees_zero
    assert useful.sees_scale


def test_a_result_that_is_exactly_zero() -> None:
    zero = torch.zeros(4, 8, dtype=torch.float64)
    same = [zero] * 8
    assert compare("y", zero.float(), zero.float(), zero, same).passed
    assert not compare("y", zero.float() + 1e-30, zero.float(), zero, same).passed
    magnitude = torch.ones_like(zero)
    assert compare("y", zero.float() + 1e-8, zero.float(), zero, same, magnitude=magnitude).passed
    assert not compare(
        "y", zero.float() + 1e-5, zero.float(), zero, same, magnitude=magnitude
    ).passed


def test_the_message_names_norm_error_and_bound() -> None:
    oracle, *_ = rounded()
    text = str(judge(oracle * 1.01))
    assert text.startswith("y: tensor error")
    assert "> allowed" in text
    assert "scale error 0.01" in text
