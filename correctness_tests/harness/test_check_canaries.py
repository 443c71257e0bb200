"""Canaries lie around every input and upstream gradient in every layout, and around outputs: code
that is no interpreted kernel is held to its buffers too."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.support.tried import MATRIX, finding, small
from tinyllama.harness import Provider
from tinyllama.harness.correct.checks import Candidate, Outcome, accuracy
from tinyllama.harness.correct.checks.guards import GuardedMemory
from tinyllama.harness.correct.layouts import LAYOUTS, UPSTREAMS

op = small("added", lambda x, y: x + y, {"x": MATRIX, "y": MATRIX}, {"z": "N D"})
BEYOND = 3  # elements


def layout_of(tensor: torch.Tensor) -> str:
    strides = tensor.stride()
    if strides == (0, 0):
        return "summed"
    if strides[0] == 0:
        return "expanded"
    if strides[1] == 2 and strides[0] == 2 * tensor.shape[1]:
        return "strided"
    if strides[0] == 1:
        return "transposed"
    if strides == (tensor.shape[1] + 1, 1) and tensor.data_ptr() % 16 == 0:
        return "padded"
    if strides != (tensor.shape[1], 1):
        return "distinct"
    return "offset" if tensor.data_ptr() % 16 else "contiguous"


def store_beyond(tensor: torch.Tensor) -> None:
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    end = tensor.storage_offset() + 1 + sum((n - 1) * s for n, s in pairs)
    tensor.detach().as_strided((1,), (1,), end + BEYOND - 1).fill_(1.0)


class Beyond(torch.autograd.Function):
    """The sum, which stores beyond a tensor if that has a layout."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor, which: str, layout: str) -> Any:
        ctx.asked = which, layout
        given = {"x": x, "y": y}.get(which)
        if given is not None and layout_of(given) == layout:
            store_beyond(given)
        z = torch.empty(x.shape).copy_(x + y)
        if which == "z":
            store_beyond(z)
        return z

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        which, layout = ctx.asked
        if which == "grad z" and layout_of(gradients[0]) == layout:
            store_beyond(gradients[0])
        return gradients[0].clone(), gradients[0].clone(), None, None


EACH = [
    *(("x", layout) for layout in LAYOUTS if layout != "distinct"),  # of the first input: padded
    *(("y", layout) for layout in LAYOUTS),
    *(("grad z", layout) for layout in UPSTREAMS),
    ("z", "contiguous"),
]


@pytest.mark.parametrize(("which", "layout"), EACH, ids=[" ".join(one) for one in EACH])
def test_a_store_beyond_a_tensor_in_one_layout_is_found(which: str, layout: str) -> None:
    one = finding(op, lambda x, y: Beyond.apply(x, y, which, layout), "out of bounds")
    assert one.outcome is Outcome.FAILED, one
    named = "a buffer" if which == "z" else f"{which}, a buffer"
    assert f"a store {4 * (BEYOND - 1)} bytes after {named} of" in one.message


@pytest.mark.parametrize(("elements", "side"), [(-2, "before"), (6, "after")])
def test_the_byte_nearest_to_a_buffer_tells_how_far_a_store_was(elements: int, side: str) -> None:
    guards = GuardedMemory()
    x = guards.guarded(torch.zeros(5), "x")
    x.as_strided((1,), (1,), x.storage_offset() + elements).fill_(1.0)
    assert guards.broken() == [f"a store 4 bytes {side} x, a buffer of 20 bytes"]
    assert guards.broken() == [], "said once"


@pytest.mark.parametrize("raises", [False, True], ids=["ends", "raises"])
def test_beside_a_store_beyond_an_input_only_what_is_a_fault_by_itself_is_told(
    raises: bool,
) -> None:
    """The bytes around an input are not the input: it is not called changed. An error is told."""

    def call(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = Beyond.apply(x, y, "x", "contiguous")
        if raises:
            raise ArithmeticError("no result today")
        return z

    candidate = Candidate(op, Provider(op.name, "tried", call, op.dtypes))
    findings = [
        (one.check, one.outcome) for one in accuracy.faults(candidate, candidate.smallest())
    ]
    crash = [("outputs", Outcome.CRASHED)] if raises else []
    failed = [one for one in findings if one[1] is not Outcome.BLOCKED]
    assert failed == [("out of bounds", Outcome.FAILED), *crash]
