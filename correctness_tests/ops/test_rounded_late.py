"""Kernels round to 16 bits what they store and what products take, and nothing on the way to it.

Bounds of accuracy and a reference allow more: a sum of rounded products passes, and so does a norm
of what is not what was stored. Here each launch is made twice, once with values that are rounded
late; what differs was rounded on the way. That has to be so by design, and then it has to be seen.
"""

import functools
from collections.abc import Iterable

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.support.late import rounded_on_the_way
from correctness_tests.support.launched import every_launch, tree_ops
from correctness_tests.support.ways import ways
from tinyllama.harness.check.evaluate import evaluate

pytestmark = pytest.mark.long

BF16 = torch.bfloat16
AS_STORED = "the norm is that of the sum as it is stored"
STORED_GATES = "the activation is that of gate and up as they are stored"
BY_DESIGN = {
    "rms_norm.forward_kernel": ({"y", "rstd"}, AS_STORED),
    "stack.fold_kernel": ({"low", "squares", "rstd"}, AS_STORED),
    "stack.gate_up_kernel": ({"h"}, STORED_GATES),
    "stack.residual_kernel": ({"low", "squares"}, AS_STORED),
    "stack.single_forward_kernel": (
        {"low_2", "squares_2", "after_low", "after_squares", "h"},
        f"{AS_STORED}, and {STORED_GATES}",
    ),
}


@functools.cache
def found_of(name: str) -> frozenset[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    for way in ways(name, BF16):
        with rounded_on_the_way() as differ:
            evaluate(way.op, way.provider.call, way.inputs("cpu"))
        found |= differ
    return frozenset(found)


NAMES = [op.name for op in tree_ops() if BF16 in op.dtypes]


@pytest.mark.parametrize("name", NAMES)
def test_a_launch_rounds_on_the_way_only_by_design(name: str) -> None:
    found = {(kernel, written) for kernel, written in found_of(name) if written}
    allowed = {(kernel, one) for kernel, (every, _) in BY_DESIGN.items() for one in every}
    assert not found - allowed


def test_what_is_to_be_rounded_first_is_and_every_kernel_is_tried() -> None:
    found = set().union(*map(found_of, NAMES))
    for kernel, (every, reason) in BY_DESIGN.items():
        assert {one for name, one in found if name == kernel and one} == every, (kernel, reason)
    takes = {one.identity for one in every_launch() if BF16 in _dtypes(one.arguments.values())}
    assert not takes - {kernel for kernel, _ in found}


def _dtypes(values: Iterable[object]) -> set[torch.dtype]:
    return {one.dtype for one in values if isinstance(one, torch.Tensor)}
