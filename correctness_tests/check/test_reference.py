"""A reference that contradicts its independent code, or leaves float64, is found and named."""

from collections.abc import Callable

import pytest
import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.reference import narrow
from tinyllama.harness.check.run import Candidate, Finding, Outcome, Rank, run
from tinyllama.harness.values import normal
from tinyllama.ops import OPS

pytestmark = pytest.mark.quick
T = torch.Tensor
CPU = torch.device("cpu")


def doubled(reference: Callable[[T], T], independent: Callable[[T], T] | None = None) -> Op:
    op = Op(
        "doubled",
        inputs={"x": Tensor("N D", grad=True)},
        outputs={"y": "N D"},
        cases=[Case(N=4, D=16), Case(N=3, D=20, why="another size")],
        extremes={"negative": {"x": normal(1.0, mean=-3.0)}},
    )
    op.reference(lambda x: reference(x))
    if independent is not None:
        op.independent("the other")(lambda x: independent(x))
    return op


def of_reference(op: Op) -> dict[str, Finding]:
    return {
        finding.check: finding
        for finding in run(Candidate(op, op["eager"]), ["outputs", "gradients"])
    }


class Detached(torch.autograd.Function):
    """Right outputs, and half of the gradient."""

    @staticmethod
    def forward(ctx: object, x: T) -> T:
        return x * 2

    @staticmethod
    def backward(ctx: object, dy: T) -> T:
        return dy


@pytest.mark.long
def test_a_reference_that_contradicts_its_independent_code_fails() -> None:
    findings = of_reference(doubled(lambda x: x * 3, lambda x: x + x))
    assert {f.rank for f in findings.values()} == {Rank.WRONG}
    text = "the reference contradicts the independent code 'the other': y: differs by"
    assert findings["outputs"].message.startswith(text)
    findings = of_reference(doubled(Detached.apply, lambda x: x + x))
    assert findings["outputs"].outcome is Outcome.PASSED
    assert "grad x: differs" in findings["gradients"].message
    for right in (doubled(lambda x: x * 2, lambda x: x + x), doubled(lambda x: x * 2)):
        assert {f.outcome for f in of_reference(right).values()} == {Outcome.PASSED}


@pytest.mark.parametrize(
    "rounds",
    [
        lambda x: x.float().exp().to(x.dtype),
        lambda x: torch.softmax(x.float(), -1).to(x.dtype) * x,
    ],
)
def test_a_reference_that_leaves_float64_is_told(rounds: Callable[[T], T]) -> None:
    finding = of_reference(doubled(rounds))["outputs"]
    assert (finding.outcome, finding.rank) == (Outcome.FAILED, Rank.WARNING)
    assert f"{__file__}:" in finding.message
    assert "rounds float64 to float32, but the reference is the oracle" in finding.message
    assert "torch.promote_types(x.dtype, torch.float32)" in finding.message


@pytest.mark.parametrize(
    "steps",
    [torch.relu, torch.sign, torch.round, lambda x: x.cumsum(-1), lambda x: x.sort(-1).values],
)
def test_steps_of_the_op_itself_are_no_rounding(steps: Callable[[T], T]) -> None:
    op = doubled(steps)
    assert not narrow(OpCase(op, op["eager"], op.cases[0], torch.float32), 0)


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_references_of_the_tree_stay_in_float64(op: Op) -> None:
    assert not narrow(OpCase(op, op["eager"], op.cases[0], op.dtypes[0]), 0)
