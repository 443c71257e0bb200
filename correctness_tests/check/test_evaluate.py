"""What a call must leave as it was, and what it must return."""

import re
from collections.abc import Callable

import pytest
import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.check.evaluate import (
    GradientError,
    Inputs,
    evaluate,
    make_inputs,
)
from tinyllama.ops import OPS

OP = OPS["rms_norm"]
EAGER = OP["eager"].call


# -- memory that must stay as it was ----------------------------------------------------------


def writing(write: Callable[[torch.Tensor], object]) -> Callable[..., torch.Tensor]:
    """Right, but for what it does to its first input, unseen by autograd, as a kernel would."""

    def call(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        y = EAGER(x, weight, eps)
        write(x.data)
        return y

    return call


def into_a_gap(x: torch.Tensor) -> None:
    """Between its first two elements."""
    x.as_strided((1,), (1,), x.storage_offset() + 1).fill_(7)


@pytest.mark.parametrize(
    "write",
    [into_a_gap, lambda x: x.mul_(2), lambda x: x[-1:, ..., -1:].mul_(-1)],
    ids=["a gap", "everything", "the sign of a zero"],
)
def test_whatever_is_written_into_an_input_is_seen(write: Callable[[torch.Tensor], object]) -> None:
    inputs = make_inputs(OP, OP.cases[0], torch.float32, layout="strided")
    inputs.args["x"][-1:, ..., -1:] = 0.0
    with pytest.raises(AssertionError, match="rms_norm: forward changed its input x"):
        evaluate(OP, writing(write), inputs)


# -- upstream gradients -----------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [None, ("x",)])
@pytest.mark.parametrize(
    ("detached", "expected"),
    [((), [32.0] * 3), (("y",), [30.0] * 3), (("z",), [2.0] * 3), (("y", "z"), None)],
)
def test_an_output_may_be_detached_only_where_some_gradients_are_wanted(
    detached: tuple[str, ...], expected: list[float] | None, wanted: tuple[str, ...] | None
) -> None:
    op = Op(
        "both",
        inputs={"x": Tensor("N", grad=True)},
        outputs={"y": "N", "z": "N"},
        cases=[Case(N=3)],
    )

    def call(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = {"y": 2 * x, "z": 3 * x}
        return tuple(y.detach() if name in detached else y for name, y in outputs.items())

    op.reference(call)
    ones = torch.ones(3)
    inputs = Inputs({"x": ones}, {"y": ones, "z": 10 * ones}, {}, wanted=wanted)
    if detached and wanted is None:
        with pytest.raises(GradientError, match=rf"outputs {re.escape(str([*detached]))} are det"):
            evaluate(op, call, inputs)
        return
    results = evaluate(op, call, inputs)
    assert {n: v.tolist() for n, v in results.items() if n == "grad x"} == (
        {"grad x": expected} if expected else {}
    )
