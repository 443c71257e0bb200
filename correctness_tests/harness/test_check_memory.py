"""How tensors are laid to each other for a call, and which parts of gradients are compared."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from correctness_tests.support.tried import FP32, MATRIX, small, with_backward
from tinyllama.harness import Provider
from tinyllama.harness.correct.checks import Candidate, between, calls, memory, state
from tinyllama.harness.correct.evaluate import GradientError, Inputs

F32, F64 = torch.float32, torch.float64


def args() -> dict[str, Any]:
    return {
        "a": torch.arange(6.0).view(2, 3),
        "b": torch.arange(10.0, 14.0).view(2, 2),
        "c": torch.arange(20.0, 26.0).view(2, 3),
    }


def start(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_tensors_lie_behind_each_other_the_last_one_first() -> None:
    before = args()
    found = memory._behind(before, ["a", "b", "c"])
    assert {name: found[name].storage_offset() for name in "abc"} == {"c": 0, "b": 6, "a": 10}
    assert len({start(one) for one in found.values()}) == 1
    assert all(torch.equal(found[name], before[name]) for name in "abc")


def test_tensors_are_columns_of_one_buffer_the_last_one_first() -> None:
    before = args()
    found = memory._columns(before, ["a", "c"])
    assert {name: found[name].storage_offset() for name in "ac"} == {"c": 0, "a": 3}
    assert {found[name].stride() for name in "ac"} == {(6, 1)}
    assert all(torch.equal(found[name], before[name]) for name in "ac")


def test_tensors_are_one_and_others_in_the_same_memory() -> None:
    before = args()
    one = memory._one(before, ["a", "b", "c"])
    assert list(one) == ["a", "b", "c"]
    assert {start(value) for value in one.values()} == {start(before["a"])}
    strided = {"x": before["a"].T[1:], "several": [before["b"], before["c"]]}
    other = memory.again(strided)
    flat = [strided["x"], *strided["several"]], [other["x"], *other["several"]]
    for mine, new in zip(*flat, strict=True):
        assert mine is not new
        assert (new.data_ptr(), new.shape, new.stride()) == (
            mine.data_ptr(),
            mine.shape,
            mine.stride(),
        )


def test_one_tensor_for_two_inputs_may_not_give_the_results_of_two() -> None:
    """The first call's results are kept, and right for these values wherever they lie."""
    kept: list[torch.Tensor] = []

    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        kept.append(2 * x + y)
        return kept[0].clone()

    call = with_backward(forward, lambda gradient, x, y: (2 * gradient, gradient))
    inputs = {"x": MATRIX, "y": MATRIX}
    op = small("twice", lambda x, y: 2 * x + y, inputs, {"z": "N D"})
    candidate = Candidate(op, Provider(op.name, "kept", call, dtypes=FP32))
    problem = memory.neighbours(candidate)
    assert len(kept) == 4, "as it is, behind each other, as columns, and as one"
    assert problem is not None
    assert problem[1].startswith("x, y one tensor: ")


def test_outputs_in_the_memory_of_inputs_are_found() -> None:
    given = {**args(), "several": [torch.ones(2), torch.ones(3)], "none": torch.ones(0)}
    outputs = (torch.ones(2), given["c"][1:], given["several"][1], torch.ones(0), given["a"].T)
    assert memory.shared(given, outputs) == {1: "c", 2: "several", 4: "a"}
    assert memory._dtypes(Inputs({**args(), "d": torch.ones(1, dtype=F64)}, {}, {})) == [F32, F64]


@pytest.mark.parametrize(
    ("tensor", "overlaps"),
    [
        (torch.ones(2, 3), False),
        (torch.ones(3).expand(2, 3), True),
        (torch.ones(2, 1).expand(2, 3), True),
        (torch.ones(3).expand(1, 3), False),
        (torch.ones(()), False),
        (torch.ones(0, 1).expand(0, 3), False),
        (torch.ones(1).expand(2), True),
    ],
)
def test_elements_share_memory_along_an_axis_without_a_stride(
    tensor: torch.Tensor, overlaps: bool
) -> None:
    assert memory._overlaps(tensor) is overlaps


def seen() -> dict[str, Any]:
    return {name: one.get() for name, one in state.SETTINGS.items()}


def differ(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [name for name, value in one.items() if not state.same_setting(value, other[name])]


@pytest.mark.parametrize("name", state.SETTINGS)
def test_what_a_call_may_leave_behind_is_each_seen_and_put_back(name: str) -> None:
    usual, one = seen(), state.SETTINGS[name]
    modes = torch._C._len_torch_function_stack()
    values = {
        "whether gradients are computed": False,
        "whether algorithms are deterministic": True,
        "the default device": "meta",
        "whether attention may be torch's own formula": False,
        "whether autocast is on for cpu": True,
        "whether autocast is on for cuda": True,
        "the random numbers that follow": torch.Generator().manual_seed(1).get_state(),
        "Python's random numbers that follow": random.Random(1).getstate(),
        "NumPy's random numbers that follow": np.random.RandomState(1).get_state(),
    }
    with state._others():
        before = seen()
        others = {n: one.other(usual[n]) for n, one in state.SETTINGS.items() if one.other}
        assert set(differ(usual, before)) == {
            n for n, value in others.items() if not state.same_setting(value, usual[n])
        }
        one.set(values[name] if one.other is None or name in values else one.other(before[name]))
        assert differ(before, seen()) == [name]
    assert not differ(usual, seen())
    assert torch._C._len_torch_function_stack() == modes


# -- successive calls -----------------------------------------------------------------------------


def test_a_table_that_is_the_same_in_every_draw_is_reversed() -> None:
    table, at, single = torch.arange(6.0).view(3, 2), torch.arange(3), torch.tensor(2.0)
    first = {"x": torch.zeros(3), "table": table, "at": at, "one": single, "several": [table]}
    found = calls._other(Inputs(first, {}, {}), Inputs({**first, "x": torch.ones(3)}, {}, {})).args
    assert torch.equal(found["x"], torch.ones(3))
    assert torch.equal(found["table"], table.flip(0))
    assert [found[name] is first[name] for name in ("at", "one", "several")] == [True] * 3
    assert list(calls._names(first)) == ["x", "table", "at", "one", "several"]
    assert list(calls._names({"a": [at, at], "b": at})) == ["a", "a", "b"]


def test_two_parts_of_a_gradient_add_up_and_leave_out_rows() -> None:
    """Each third row is of the second part alone, and others in the next tensor."""
    whole = [torch.ones(7, 64), torch.ones(2, 3, 64), torch.ones(64)]
    first, second = ([part(one) for one in whole] for part in map(calls._Part, (True, False)))
    for one, other, both in zip(first, second, whole, strict=True):
        assert torch.equal(one + other, both)
        assert bool((one * other == 0).all())
        assert 0.2 < float(one.mean()) < 0.6
    empty = [(one.flatten(0, -2).sum(-1) == 0).nonzero().flatten().tolist() for one in first[:2]]
    assert empty == [[0, 3, 6], [2, 5]]


def test_gradients_that_differ_or_are_missing_are_named() -> None:
    one = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}
    other = {"a": torch.ones(2), "b": torch.zeros(2)}
    assert list(between.differing(one, other)) == ["b", "c"]
    assert list(between.differing(one, one)) == []


@pytest.mark.parametrize(("tells", "refused"), [(True, True), (False, False)])
def test_a_gradient_that_is_zero_is_refused_where_the_references_is_not(
    tells: bool, refused: bool
) -> None:
    candidate: Any = SimpleNamespace(op=SimpleNamespace(name="op"), tells=lambda case: tells)
    case: Any = None
    calls._refuse_zeros(candidate, case, {"a": torch.ones(1)})
    gradients = {"a": torch.ones(1), "b": torch.zeros(1), "c": torch.zeros(2)}
    if refused:
        with pytest.raises(GradientError, match=r"op: all of the gradient is 0: b, c$"):
            calls._refuse_zeros(candidate, case, gradients)
    else:
        calls._refuse_zeros(candidate, case, gradients)
