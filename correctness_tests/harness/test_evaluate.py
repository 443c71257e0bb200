"""What results are held to: inputs moved by a rounding, and memory that must stay as it was."""

import itertools
import math
import re
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.correct.cases import OpCase, References, _subsets, full_cases, op_cases
from tinyllama.harness.correct.evaluate import (
    ChangedInputError,
    GradientError,
    Inputs,
    OutputError,
    _named_outputs,
    evaluate,
    make_inputs,
    mutated_results,
)
from tinyllama.harness.correct.layouts import LAYOUTS, REPEATING, UPSTREAMS
from tinyllama.harness.declare.values import (
    Values,
    constant,
    integers,
    normal,
    scaled_rows,
    uniform,
)
from tinyllama.ops import OPS
from tinyllama.suites import accuracy

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


def test_parameters_move_by_half_a_unit_of_float32() -> None:
    shares = [ones(torch.bfloat16).perturbed(seed).params["eps"] / 0.5 - 1 for seed in range(50)]
    unit = torch.finfo(torch.float32).eps
    assert 0.4 * unit < max(map(abs, shares)) <= 0.5 * unit
    assert ones(torch.bfloat16).perturbed(0).params["times"] == 3


def test_each_seed_moves_otherwise_and_one_always_alike() -> None:
    first, again, other = (ones(torch.float32).perturbed(seed) for seed in (0, 0, 1))
    assert torch.equal(first.args["x"], again.args["x"])
    assert first.params == again.params
    assert not torch.equal(first.args["x"], other.args["x"])
    assert first.params != other.params
    assert first.upstream["y"] is not None
    assert not torch.equal(first.args["x"], first.upstream["y"])


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


def test_an_error_says_which_pass_changed_what() -> None:
    error = ChangedInputError("op", ["its input x"], ["its input y", "its input z"])
    assert (error.forward, error.backward) == (["its input x"], ["its input y", "its input z"])
    said = "op: forward changed its input x; backward changed its input y and its input z"
    assert str(error) == said


def test_a_nan_that_stays_is_no_change() -> None:
    inputs = strided()
    inputs.args["x"][0] = math.nan
    assert evaluate(OP, EAGER, inputs)["y"].isnan().any()


# -- upstream gradients -----------------------------------------------------------------------


def test_each_output_has_its_own_share_of_a_gradient() -> None:
    op = Op(
        "both",
        inputs={"x": Tensor("N", grad=True)},
        outputs={"y": "N", "z": "N"},
        cases=[Case(N=3)],
    )
    op.reference(lambda x: (2 * x, 3 * x))
    one = torch.ones(3)
    inputs = Inputs({"x": one}, {"y": one, "z": 10 * one}, {})
    assert evaluate(op, op["eager"].call, inputs)["grad x"].tolist() == [32.0] * 3
    inputs = Inputs({"x": one}, {"y": one, "z": None}, {})
    assert evaluate(op, op["eager"].call, inputs)["grad x"].tolist() == [2.0] * 3


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


def test_gradients_are_wanted_in_every_part_or_of_many_alone_and_all_but_one() -> None:
    def parts(names: str, most: int) -> list[str]:
        return ["".join(one) for one in _subsets(names, most)]

    assert parts("abc", 3) == ["a", "b", "c", "ab", "ac", "bc"]
    pairs = ["ab", "ac", "ad", "bc", "bd", "cd"]
    assert parts("abcd", 4) == [*"abcd", *pairs, "abc", "abd", "acd", "bcd"]
    assert parts("abcd", 3) == [*"abcd", "abc", "abd", "acd", "bcd"]
    assert parts("ab", 3) == ["a", "b"]
    assert parts("a", 3) == []


@pytest.mark.parametrize("count", [0, 1, 2, 4, 5])
def test_what_is_left_to_the_full_run_is_every_shape_with_every_variation(count: int) -> None:
    """And every part of the gradients, of five or more each one alone and all but each one."""
    names = "abcde"[:count]
    op = Op(
        "several",
        inputs={name: Tensor("B", grad=name in names) for name in "abcde"},
        outputs={"y": "B"},
        cases=[Case(B=2), Case(B=3), Case(B=4)],
        dtypes=(torch.float32, torch.bfloat16),
        extremes={"tiny": {"a": normal(1e-3)}},
    )

    @op.reference
    def several(
        a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor, e: torch.Tensor
    ) -> torch.Tensor:
        return a + b + c + d + e

    quick = [str(case) for case in op_cases([op])]
    full = [str(case) for case in full_cases([op])]
    assert len(full) == len(set(full))
    assert set(full).isdisjoint(quick)
    kinds = [
        OpCase(op, op["eager"], case, dtype, extreme, layout, upstream)
        for dtype in op.dtypes
        for case in op.cases
        for extreme in (None, "tiny")
        for layout, upstream in zip(LAYOUTS, UPSTREAMS, strict=True)
    ]
    each = range(1, count) if count <= 4 else (1, count - 1)
    parts = [part for size in each for part in itertools.combinations(names, size)]
    kinds += [
        OpCase(op, op["eager"], case, dtype, wanted=part)
        for dtype in op.dtypes
        for part in parts
        for case in op.cases
    ]
    assert set(full) == {str(case) for case in kinds} - set(quick)


@pytest.mark.parametrize("names", [*itertools.permutations(["at", "x", "wide"])], ids="-".join)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_output_has_the_dtype_of_the_first_floating_input(
    names: tuple[str, ...], count: int
) -> None:
    """Without one, that of the first input."""
    of = {"at": torch.int64, "x": torch.bfloat16, "wide": torch.float32}
    names = names[:count]
    whole = Tensor("B", dtype=torch.int64, values=integers(2))
    inputs = {name: whole if name == "at" else Tensor("B") for name in names}
    op = Op("mixed", inputs=inputs, outputs={"y": "B"}, cases=[Case(B=2)])
    args = {name: torch.zeros(2, dtype=of[name]) for name in names}
    expected = next((of[name] for name in names if name != "at"), torch.int64)
    for dtype in of.values():
        outputs = torch.zeros(2, dtype=dtype)
        if dtype is expected:
            assert _named_outputs(op, outputs, args, {}, {})["y"] is outputs
            continue
        with pytest.raises(OutputError, match=f"mixed: y has dtype {dtype}, not {expected}"):
            _named_outputs(op, outputs, args, {}, {})


# -- references that cases share ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["rms_norm", "adamw", "cross_entropy", "swiglu"])
def test_cases_share_references_if_their_inputs_have_equal_values(name: str) -> None:
    op = OPS[name]
    first = OpCase(op, op["eager"], op.cases[0], op.dtypes[0])
    alike: list[OpCase] = []
    layouts = ("strided", *REPEATING)
    alone = [name for name, one in op.inputs.items() if not one.mutated]
    more = [replace(first, layout=each, alone=name) for each in layouts for name in alone]
    more += [replace(first, upstream=each) for each in layouts]
    varied = [case for case in op_cases([op], providers=["eager"]) if case.varied]
    for case in [*varied, *more]:
        alike.append(case.of_equal_values())
        own, shared = case.inputs(), alike[-1].inputs()
        for one, other in ((own.args, shared.args), (own.upstream, shared.upstream)):
            for value, same in zip(tree_leaves(one), tree_leaves(other), strict=True):
                assert torch.equal(value, same) if same is not None else value is None
        assert own.params == shared.params
    rare = {case.layout for case in varied} & {
        "swapped",
        "channels_last",
        "cut",
        "parted",
    }  # in the first's dtype
    count = len(LAYOUTS) - len(("contiguous", "expanded")) + len(rare)
    subsets = sum(case.wanted is not None for case in varied)
    plain = (2 * count if op.differentiable else count) + subsets
    assert alike[: len(varied)].count(first) == plain
    assert alike[len(varied) :] == [
        first if "strided" in (case.layout, case.upstream) else case for case in more
    ]


def test_a_case_that_wants_some_gradients_is_compared_with_these() -> None:
    op = OPS["swiglu"]
    every = OpCase(op, op["eager"], op.cases[0], torch.float32)
    shared = every.references(every.inputs())
    assert shared.asked_for(None) is shared
    for case in op_cases([op], providers=["eager"]):
        if case.wanted is None:
            continue
        found, own = shared.asked_for(case.wanted), case.references(case.inputs())
        for one, other in zip(
            (found.eager, found.oracle, *found.perturbed),
            (own.eager, own.oracle, *own.perturbed),
            strict=True,
        ):
            assert one.keys() == other.keys() < shared.oracle.keys()
            for result, value in one.items():
                torch.testing.assert_close(value, other[result])


def test_references_are_computed_once_for_the_cases_that_share_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    op = OPS["rms_norm"]
    made: list[str] = []
    own = OpCase.references

    def noted(case: OpCase, inputs: Inputs, draws: int = 1) -> References:
        made.append(str(case))
        return own(case, inputs, draws)

    monkeypatch.setattr(OpCase, "references", noted)
    monkeypatch.setattr(accuracy, "_RECENT", deque(maxlen=accuracy.KEPT))
    first = OpCase(op, op["eager"], op.cases[0], torch.float32)
    other = replace(first, case=op.cases[1])
    turns = [first, *(replace(first, layout=one) for one in LAYOUTS), other, first]
    turns += [replace(first, wanted=("x",)), replace(first, provider=op["triton"]), other]
    for case in turns:
        accuracy.assert_accurate(case, torch.device("cpu"), 0)
    assert made == list(map(str, [first, replace(first, layout="expanded"), other]))
    for seed in range(1, accuracy.KEPT + 1):
        accuracy.assert_accurate(first, torch.device("cpu"), seed)
    assert len(accuracy._RECENT) == accuracy.KEPT
    accuracy.assert_accurate(first, torch.device("cpu"), 0)
    assert made == [*map(str, [first, replace(first, layout="expanded"), other])] + [str(first)] * (
        accuracy.KEPT + 1
    )


def test_each_tensor_that_an_op_in_place_writes_is_a_result() -> None:
    op = Op(
        "moved",
        inputs={"p": Tensor("P", mutated=True, many=True), "t": Tensor("", mutated=True)},
        outputs={},
        cases=[Case(P=(5, 1, 3))],
    )
    p, t = [torch.ones(size) for size in (5, 1, 3)], torch.ones(())
    found = mutated_results(op, {"p": p, "t": t})
    assert list(found) == ["p[0]", "p[1]", "p[2]", "t"]
    assert all(one is given for one, given in zip(found.values(), (*p, t), strict=True))
