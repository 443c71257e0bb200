"""Faults of a way that code takes beyond a size, or at a value of a parameter: each was passed
once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.support.tried import assert_found, in_each_dtype, small
from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.correct.checks import sizes
from tinyllama.harness.correct.checks.thresholds import compared_with, thresholds
from tinyllama.harness.kernels.launch import jit, tl

T = torch.Tensor
Call = Callable[..., Any]
SPECIAL, SIZES = "special values", "sizes"
ROWS = [Case(N=4, D=64), Case(N=3, D=50)]
X = {"x": Tensor("N D")}
WIDE, STEP = 320, 64

# -- beyond a size ---------------------------------------------------------------------------------


def wide(x: T) -> T:
    whole = x.shape[1] >= WIDE and x.shape[1] % STEP == 0
    return x[:, STEP:].sum(1) if whole else x.sum(1)


def both_large(x: T) -> T:
    return x.sum(0) if min(x.shape) < 2**8 else x[: x.shape[0] // 256 * 256].sum(0)


def attended(q: T, k: T) -> T:
    return torch.softmax(q @ k.mT, -1) @ k


def split(q: T, k: T) -> T:
    if q.shape[1] > 1 or k.shape[1] < 256:
        return attended(q, k)
    parts = [attended(q, one) for one in k.split(128, 1)]
    return sum(parts[1:], parts[0]) / len(parts)


ROW_SUM = small("row_sum", lambda x: x.sum(1), X, {"y": "N"}, ROWS)
COLUMN_SUM = small("column_sum", lambda x: x.sum(0), X, {"y": "D"}, ROWS)
DECODING = small(
    "decoding",
    attended,
    {"q": Tensor("B T D"), "k": Tensor("B S D")},
    {"o": "B T D"},
    [Case(B=2, T=5, S=6, D=8), Case(B=2, T=1, S=20, D=8)],
)


@pytest.mark.parametrize(
    ("op", "call", "case"),
    [(ROW_SUM, wide, "D320"), (COLUMN_SUM, both_large, "N259D259"), (DECODING, split, "T1S259")],
    ids=["a whole width", "two axes", "another case"],
)
def test_a_way_beyond_a_size_is_taken(
    monkeypatch: pytest.MonkeyPatch, op: Op, call: Call, case: str
) -> None:
    monkeypatch.setattr(sizes, "SIZES", (67, 131))
    found = assert_found(op, call, SIZES, "outputs: ")
    assert case in found.case


@pytest.mark.parametrize("width", [8, 16, 32])
def test_a_length_is_an_odd_number_of_small_blocks(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """Which code takes for whole blocks of twice the width."""
    monkeypatch.setattr(sizes, "SIZES", [one for one in sizes.SIZES if 64 < one < 131])

    def even(x: T) -> T:
        whole = not x.shape[1] % width
        return x[:, : x.shape[1] // (2 * width) * 2 * width].sum(1) if whole else x.sum(1)

    found = assert_found(ROW_SUM, even, SIZES, "outputs: ")
    assert f"D{ {8: 72, 16: 80, 32: 96}[width] }" in found.case


def test_a_list_has_an_empty_tensor_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def halved(several: list[T]) -> None:
        for one in several:
            one.mul_(0.5)

    def until_empty(several: list[T]) -> None:
        for one in several:
            if not one.numel():
                return
            one.mul_(0.5)

    def refusing(several: list[T]) -> None:
        if not all(one.numel() for one in several):
            raise ValueError("an empty tensor")
        halved(several)

    monkeypatch.setattr(sizes, "LISTS", (1,))
    several = {"several": Tensor("N", mutated=True, many=True)}
    op = small("halved", halved, several, {}, [Case(N=(5, 3)), Case(N=(4,))])
    assert "one of them empty" in assert_found(op, until_empty, SIZES, "several[2]").case
    assert in_each_dtype(op, refusing, SIZES).rank is None


def test_leading_axes_are_any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of four axes are given in the shape of two."""
    monkeypatch.setattr(sizes, "SIZES", (67, 131))
    cases = [Case(N=4, D=8), Case(N=(2, 3), D=5)]
    op = small("summed", lambda x: x.sum(-1), X, {"y": "N"}, cases, leading=("N",))

    def of_two(x: T) -> T:
        return x.sum(-1).flatten(1) if x.dim() > 3 else x.sum(-1)

    assert "N2x1x3" in assert_found(op, of_two, SIZES, "outputs: ").case
    assert in_each_dtype(op, lambda x: x.sum(-1), SIZES).rank is None


def test_sizes_that_code_compares_with_are_known() -> None:
    assert thresholds(wide) == [STEP, WIDE]
    assert thresholds(both_large) == [8, 256]
    assert thresholds(split) == [256]
    assert thresholds(lambda x: wide(x)) == [STEP, WIDE]
    assert thresholds(torch.relu) == []

    def in_steps(x: T) -> bool:
        return len(x) > 100 and not (len(x) % 48 or len(x) % 30)

    def of_the_ends(x: T) -> bool:
        return len(x) in (0, 3, 4, 65536, 65537) or bool(len(x) % 48)

    def computed(x: T) -> bool:
        return len(x) in (10 + 11, 70 - 20, 3 * 30, 5**3)

    assert thresholds(in_steps) == [100, 120, 144], "the next multiple of each"
    assert thresholds(of_the_ends) == [4, 48, 65536]
    assert thresholds(computed) == [5, 10, 11, 20, 21, 30, 50, 70, 90, 125]


CUBE, WINDOW = 3.0, 5


def of_cubes(x: T, p: float) -> T:
    return x.pow(3).sum(1).abs() ** (1 / 3) if p == CUBE else torch.linalg.vector_norm(x, p, 1)


def rolled(x: T, shift: int) -> T:
    return x.roll(min(shift, WINDOW), 1) if shift > WINDOW else x.roll(shift, 1)


@pytest.mark.parametrize(
    ("reference", "call", "params", "text"),
    [
        (lambda x, p: torch.linalg.vector_norm(x, p, 1), of_cubes, {"p": 2.0}, "p = 3.0: y"),
        (lambda x, shift: x.roll(shift, 1), rolled, {"shift": 1}, "shift = 6: y"),
    ],
    ids=["equal", "beyond"],
)
def test_a_parameter_has_the_values_that_code_compares_it_with(
    reference: Call, call: Call, params: dict[str, Any], text: str
) -> None:
    op = small(
        "parameter", reference, X, {"y": "N" if "p" in params else "N D"}, ROWS, params=params
    )
    assert_found(op, call, SPECIAL, text)


def test_a_whole_number_beside_the_default_is_tried() -> None:
    """The remainder of a negative number is negative in C."""

    def left(x: T, shift: int) -> T:
        return x.roll(min(shift, 0), 1)

    cases = [Case(N=4, D=64), Case(N=3, D=50, params={"shift": -3})]
    op = small(
        "roll", lambda x, shift: x.roll(shift, 1), X, {"y": "N D"}, cases, params={"shift": 0}
    )
    assert_found(op, left, SPECIAL, "shift = 1: y")


def test_numbers_that_code_compares_a_parameter_with_are_known() -> None:
    assert compared_with(of_cubes, "p") == [3.0]
    assert compared_with(rolled, "shift") == [5]
    assert compared_with(rolled, "x") == compared_with(torch.relu, "x") == []
    assert compared_with(lambda q: q > 0.5 or q > -1 or q == 0, "q") == [0.5, 1]


def test_numbers_of_kernels_and_of_functions_within_others_are_known() -> None:
    limit = 48

    def inner(x: T) -> bool:
        return len(x) > limit + 2

    def within(x: T) -> bool:
        return inner(x)

    @jit
    def kernel(x, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
        if WIDTH >= 640:
            tl.store(x, 0)

    def launched(x: T) -> Any:
        return kernel[(1,)](x, WIDTH=len(x))

    assert thresholds(within) == [48, 50]
    assert thresholds(launched) == [640]


def test_a_remainder_of_one_ends_a_row() -> None:
    """A block of 64 with one column has no variance of its own."""

    def variance(x: T) -> T:
        last = x[:, (x.shape[1] - 1) // 64 * 64 :]
        of_last = (last - last.mean(1, keepdim=True)).square().sum(1) / (last.shape[1] - 1)
        return x.var(1, correction=0) + 0 * of_last if x.shape[1] > 64 else reference(x)

    def reference(x: T) -> T:
        return x.var(1, correction=0)

    assert_found(small("variance", reference, X, {"y": "N"}, ROWS), variance, SIZES, "outputs: ")


def test_a_size_of_one_that_a_reference_refuses_does_not_end_an_axis() -> None:
    def reference(x: T) -> T:
        assert x.shape[1] > 1
        return x.sum(1)

    op = small("more_than_one", reference, X, {"y": "N"}, ROWS)
    assert "D up to " in in_each_dtype(op, reference, SIZES).message
