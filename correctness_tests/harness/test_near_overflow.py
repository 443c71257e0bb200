"""Inputs of float16 that are almost as large as the reference takes."""

from typing import Any

import pytest
import torch

from correctness_tests.support.tried import assert_found, in_each_dtype
from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.correct.checks import Candidate, Outcome, special, unusual
from tinyllama.harness.declare.values import Values, normal

T = torch.Tensor
HALF, WIDE = torch.float16, torch.float32
CASES = [Case(N=6, D=16), Case(N=5, D=21, why="odd")]


def _sometimes_infinite(shape: tuple[int, ...], generator: torch.Generator) -> T:
    x = torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device)
    return x.masked_fill(x > 2, torch.inf)


def _rows(values: Values, *dtypes: torch.dtype, reference: Any = None) -> Op:
    x = {"x": Tensor("N D", values=values)}
    flag = {"bad": Tensor("N", dtype=torch.bool)}
    op = Op("bad_rows", inputs=x, outputs=flag, cases=CASES, dtypes=dtypes)
    op.reference(reference or (lambda x: ~x.isfinite().all(-1)))
    return op


SOMETIMES = Values("sometimes infinite", _sometimes_infinite)
infinite = _rows(SOMETIMES, WIDE, HALF)

mean = Op(
    "means",
    inputs={"x": Tensor("N D")},
    outputs={"y": "N"},
    cases=CASES,
    dtypes=(WIDE, HALF),
)
mean.reference(lambda x: x.mean(-1))


@pytest.mark.parametrize(
    ("op", "right", "wrong", "said"),
    [
        (
            infinite,
            lambda x: (x.isinf() | x.isnan()).any(-1),
            lambda x: ~x.sum(-1).isfinite(),
            "x 8192 times as large in float16",
        ),
        (
            mean,
            lambda x: (x / x.shape[-1]).sum(-1),
            lambda x: x.sum(-1) / x.shape[-1],
            "x 8192 times as large in float16",
        ),
    ],
    ids=["flag", "mean"],
)
def test_a_sum_that_overflows_before_the_reference_does_is_found(
    op: Op, right: Any, wrong: Any, said: str
) -> None:
    assert in_each_dtype(op, right, "special values").outcome is Outcome.PASSED
    assert_found(op, wrong, "special values", said)


@pytest.mark.parametrize(
    ("values", "dtypes"),
    [(normal(2.0), (HALF,)), (SOMETIMES, (WIDE,))],
    ids=["with a distribution", "not of float16"],
)
def test_of_others_nothing_is_asked(values: Values, dtypes: Any) -> None:
    op = _rows(values, *dtypes)
    candidate = Candidate(op, op["eager"])
    assert not list(unusual.near_overflow(candidate, candidate.plain()[0], special._takes))


@pytest.mark.parametrize(("limit", "factor"), [(0.0, None), (2.0, None), (32.0, 4), (3e4, 4096)])
def test_inputs_are_half_as_large_as_is_taken(limit: float, factor: int | None) -> None:
    op = _rows(SOMETIMES, HALF)
    candidate = Candidate(op, op["eager"])
    (case, *_) = candidate.plain()
    asked = list(unusual.near_overflow(candidate, case, lambda _, given: _largest(given) < limit))
    assert [one[3] for one in asked] == ([] if factor is None else [factor])
    for _, of, inputs, times in asked:
        assert of.dtype is HALF
        assert limit / 4 <= _largest(inputs) < limit / 2
        assert torch.equal(inputs.args["x"], candidate.inputs(of).args["x"].abs() * times)


def _largest(inputs: Any) -> float:
    return float(inputs.args["x"].nan_to_num(posinf=0.0, neginf=0.0).abs().max())


@pytest.mark.parametrize("most", [1.0, 10.0])
def test_what_the_reference_refuses_is_not_taken(most: float) -> None:
    def refuses(x: T) -> T:
        if (x.isfinite() & (x > most)).any():
            raise ValueError(f"x must be at most {most}")
        return x.isinf().any(-1)

    op = _rows(SOMETIMES, HALF, reference=refuses)
    candidate = Candidate(op, op["eager"])
    (case, *_) = candidate.plain()
    assert special._takes(case, candidate.inputs(case)) is (most > 2)
