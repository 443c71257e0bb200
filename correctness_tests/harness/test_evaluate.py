"""What results are held to: inputs moved by a rounding, and memory that must stay as it was."""

import math
import re
from collections.abc import Callable

import pytest
import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.evaluate import (
    GradientError,
    Inputs,
    OutputError,
    evaluate,
    make_inputs,
)
from tinyllama.harness.declare.values import (
    Values,
    constant,
    integers,
    normal,
    scaled_rows,
    uniform,
)
from tinyllama.ops import OPS

OP = OPS["rms_norm"]
EAGER = OP["eager"].call
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# -- inputs moved by a rounding ---------------------------------------------------------------


def ones(dtype: torch.dtype) -> Inputs:
    x = torch.ones(64, 64, dtype=dtype)
    return Inputs({"x": x, "several": [x, x]}, {"y": x, "z": None}, {"eps": 0.5, "times": 3})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_value_moves_by_up_to_half_a_unit_of_its_last_place(dtype: torch.dtype) -> None:
    moved = ones(dtype).perturbed(0)
    for value in (moved.args["x"], *moved.args["several"], moved.upstream["y"]):
        assert value.dtype is torch.float64
        units = (value - 1) / torch.finfo(dtype).eps
        assert -0.5 <= units.min() < -0.49
        assert 0.49 < units.max() <= 0.5
        assert abs(units.mean()) < 0.02, "to either side"
    assert moved.upstream["z"] is None


def test_an_in_place_op_is_called_as_often_as_it_declares_each_time_on_other_values() -> None:
    tensors = {"total": Tensor("N", mutated=True), "x": Tensor("N")}
    op = Op("summed", inputs=tensors, outputs={}, calls=4, cases=[Case(N=3)])

    @op.reference
    def add(total: torch.Tensor, x: torch.Tensor) -> None:
        total += x

    inputs = make_inputs(op, op.cases[0], torch.float64)
    each = [inputs.args["total"], inputs.args["x"], *(one["x"] for one in inputs.fresh)]
    expected = torch.stack([one.clone() for one in each]).sum(0)
    assert len(each) == 5
    torch.testing.assert_close(evaluate(op, add, inputs)["total"], expected)


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


def strided() -> Inputs:
    inputs = make_inputs(OP, OP.cases[0], torch.float32, layout="strided")
    assert inputs.args["x"].stride(-1) == 2
    return inputs


@pytest.mark.parametrize(
    "write",
    [into_a_gap, lambda x: x.mul_(2), lambda x: x[-1:, ..., -1:].mul_(-1)],
    ids=["a gap", "everything", "the sign of a zero"],
)
def test_whatever_is_written_into_an_input_is_seen(write: Callable[[torch.Tensor], object]) -> None:
    inputs = strided()
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
        each = {"y": 2 * x, "z": 3 * x}
        return tuple(y.detach() if name in detached else y for name, y in each.items())

    op.reference(call)
    one = torch.ones(3)
    inputs = Inputs({"x": one}, {"y": one, "z": 10 * one}, {}, wanted=wanted)
    if detached and wanted is None:
        with pytest.raises(GradientError, match=rf"outputs {re.escape(str([*detached]))} are det"):
            evaluate(op, call, inputs)
        return
    found = evaluate(op, call, inputs)
    assert {n: v.tolist() for n, v in found.items() if n == "grad x"} == (
        {"grad x": expected} if expected else {}
    )


def test_an_output_of_another_dtype_than_the_inputs_is_refused() -> None:
    inputs = make_inputs(OP, OP.cases[0], torch.bfloat16)
    with pytest.raises(OutputError, match=r"y has dtype torch\.float32, not torch\.bfloat16"):
        evaluate(OP, lambda x, weight, eps: EAGER(x, weight, eps).float(), inputs)


# -- what results are compared with -----------------------------------------------------------


def test_what_torch_makes_of_gaps_is_not_held_against_a_provider() -> None:
    """On a CPU its product of bfloat16 reads them (torch 2.13)."""

    def reads_gaps(x: torch.Tensor) -> torch.Tensor:
        return x * (1.0 if x.is_contiguous() or x.dtype is torch.float64 else math.nan)

    op = Op(
        "same", inputs={"x": Tensor("N D", grad=True)}, outputs={"y": "N D"}, cases=[Case(N=4, D=8)]
    )
    op.reference(reads_gaps)
    op.provider("right")(lambda x: x * 1.0)
    case = OpCase(op, op["right"], op.cases[0], torch.float32, layout="strided")
    assert not case.inputs().args["x"].is_contiguous()
    assert all(comparison.passed for comparison in case.compare())


# -- values of inputs ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "name", "rows"),
    [
        (normal(2.0, 1.0), "normal(1,2)", [2.0] * 5),
        (scaled_rows(0.01, 100.0), "rows(0.01..100)", [0.01, 0.1, 1.0, 10.0, 100.0]),
        (uniform(1.0, 4.0), "uniform(1,4)", [3 / 12**0.5] * 5),
        (constant(2.5), "2.5", [0.0] * 5),
        (integers(3), "integers(3)", [(2 / 3) ** 0.5] * 5),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_values_spread_as_their_name_says(values: Values, name: str, rows: list[float]) -> None:
    """rows: the standard deviation of each row."""
    found = values.sample((5, 20_000), torch.Generator().manual_seed(0)).double()
    torch.testing.assert_close(found.std(1), torch.tensor(rows).double(), rtol=0.03, atol=1e-9)
    assert values.name == name
    mean = {"normal(1,2)": 1.0, "uniform(1,4)": 2.5, "2.5": 2.5, "integers(3)": 1.0}.get(name)
    if mean is not None:
        assert abs(float(found.mean()) - mean) < 0.05
    if name.startswith("uniform"):
        assert 1 <= found.min() < 1.01
        assert 3.99 < found.max() < 4
