"""Outputs of integers and booleans: equal to the reference's, or off by what is declared."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.correct.cases import op_cases
from tinyllama.harness.correct.checks import Candidate, Outcome, Rank, run
from tinyllama.harness.correct.compare import Reference, compare
from tinyllama.harness.declare.specs import DeclarationError
from tinyllama.harness.measure import op_contender

ORACLE = torch.tensor([[5, -3, 7, 0], [100, 2, 9, 4]])
T = torch.Tensor


def changed(**by: int) -> T:
    """The right values, changed by so much: a1 is the second element of the first row."""
    found = ORACLE.clone()
    for place, change in by.items():
        found["ab".index(place[0]), int(place[1])] += change
    return found


@pytest.mark.parametrize(
    ("result", "off_by", "failing"),
    [
        (ORACLE, 0, []),
        (changed(a1=1), 0, []),  # as the reference in the case's dtype
        (changed(b2=-1), 0, []),  # as it is when an input moves by a rounding
        (changed(a2=1), 0, ["exact"]),
        (changed(a2=1, b3=-1), 1, []),
        (changed(a2=1, b1=-1, b2=1, b3=1, a0=1, a3=1, b0=1), 1, ["off by"]),
        (changed(a2=2), 1, ["exact"]),
        (ORACLE * 0, 1, ["exact"]),
    ],
)
def test_an_integer_is_right_or_off_by_what_is_declared(
    result: T, off_by: int, failing: list[str]
) -> None:
    """The reference is undecided about two elements: six may be off."""
    reference = Reference(changed(a1=1), ORACLE, [ORACLE, changed(b2=-1)], off_by=off_by)
    found = compare("y", result, reference)
    assert [check.norm for check in found.checks if not check.passed] == failing
    assert found.sees_zero


def test_booleans_are_equal() -> None:
    right = torch.tensor([True, False, True])
    reference = Reference(right, right, [right])
    assert compare("y", right, reference).passed
    assert not compare("y", ~right, reference).passed
    nothing = Reference(right & False, right & False, [right & False])
    assert compare("y", right & False, nothing).sees_zero, "zeros are right"


# -- in an op -------------------------------------------------------------------------------------


def op_of(**index: Any) -> Op:
    """The largest element of each row, and where it is."""
    op = Op(
        "best",
        inputs={"x": Tensor("N D", grad=True)},
        outputs={"value": Tensor("N"), "index": Tensor("N", dtype=torch.int64, **index)},
        cases=[Case(N=6, D=64), Case(N=7, D=33, why="ragged")],
        timed=[Case(N=8, D=32)],
        bytes={phase: lambda size, N, D: N * D * size for phase in ("forward", "backward")},
        flops={phase: lambda N, D: N * D for phase in ("forward", "backward")},
    )

    @op.reference
    def eager(x: T) -> tuple[T, ...]:
        return tuple(x.max(-1))

    @op.provider("manual", keep=("x", "index"))
    class Manual:
        @staticmethod
        def forward(x: T) -> tuple[T, ...]:
            return tuple(x.max(-1))

        @staticmethod
        def backward(grads: Any, kept: Any, saved: Any, needs: Any) -> dict[str, T]:
            dx = torch.zeros(kept["x"].shape, dtype=kept["x"].dtype)
            return {"x": dx.scatter_(-1, kept["index"][:, None], grads[0][:, None])}

    return op


def test_an_op_with_an_integral_output_passes_the_checks() -> None:
    op = op_of()
    names = ("outputs", "gradients", "input layouts", "gradient layouts", "unwritten memory")
    calls = ("scaled upstream", "backward twice", "two consumers", "fresh contents", "empty batch")
    found = run(Candidate(op, op["manual"]), only=[*names, *calls, "autocast", "determinism"])
    assert {one.check: one.outcome for one in found if one.outcome is not Outcome.PASSED} == {}


LAST = torch.arange(7) == 6


@pytest.mark.parametrize("wrong", [lambda i: i.where(~LAST[: len(i)], i + 1), lambda i: i * 0])
def test_a_wrong_index_is_found(wrong: Callable[[T], T]) -> None:
    op = op_of()

    @op.provider("tried")
    def tried(x: T) -> tuple[T, T]:
        value, index = x.max(-1)
        return value, wrong(index)

    (one,) = run(Candidate(op, op["tried"]), only=["outputs"])
    assert (one.outcome, one.rank) == (Outcome.FAILED, Rank.WRONG)
    assert re.search(r"index: \d+ elements are wrong, 0 allowed($|; kernels)", one.message)


def test_how_far_an_index_may_be_off_is_what_is_declared() -> None:
    op = op_of(off_by=1)
    case = next(case for case in op_cases([op]) if case.provider.name == "manual")
    assert case.references(case.inputs()).off_by == {"value": 0, "index": 1}


def test_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_contender, "ops_of", lambda *args: {"best": op_of()})
    one = op_contender.OpContender(op_contender.Timed("best", "manual", 0, "fp32"), "cpu", "")
    one.check_first()
    assert set(one.turn()) == {op_contender.FORWARD, op_contender.BOTH}


def test_only_integers_are_off_by() -> None:
    with pytest.raises(DeclarationError, match="'x': off_by is for integral outputs"):
        Op(
            "far",
            inputs={"x": Tensor("N D", off_by=1)},
            outputs={"y": "N D"},
            cases=[Case(N=2, D=3)],
        )
