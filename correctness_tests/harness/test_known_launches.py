"""A launch like an earlier one takes its compiled kernel, and one that differs does not.

No GPU is needed: see `correctness_tests.support.posed`, whose compiled kernels raise an error where
an argument is not what they were compiled for.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.support.posed import Posed
from tinyllama.harness.kernels import HAS_DESCRIPTORS, described, jit, tl


@jit
def add_kernel(x, y, out, factor, n, TIMES: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = factor * tl.load(x + at, mask=at < n, other=0.0)
    if y is not None:
        total += TIMES * tl.load(y + at, mask=at < n, other=0.0)
    tl.store(out + at, total, mask=at < n)


X = torch.arange(64.0)
USUAL: dict[str, Any] = {"x": X, "y": X, "factor": 2.0, "n": 64, "TIMES": 3, "BLOCK": 16}
UNLIKE: dict[str, dict[str, Any]] = {
    "dtype": {"x": X.bfloat16()},
    "address": {"x": torch.arange(65.0)[1:]},
    "no tensor": {"y": None},
    "a whole number": {"n": 63},
    "a whole number of 1": {"n": 1},
    "a whole number for a real one": {"factor": 3},
    "constant": {"BLOCK": 32},
    "a constant's type": {"TIMES": 3.5},
    "option": {"num_warps": 8},
}


def launch(out: torch.Tensor, **changed: Any) -> None:
    given = {**USUAL, **changed}
    x, y, factor, n = (given.pop(name) for name in ("x", "y", "factor", "n"))
    add_kernel[(64 // given["BLOCK"],)](x, y, out, factor, n, **given)


def expected(**changed: Any) -> torch.Tensor:
    given = {**USUAL, **changed}
    y = 0.0 if given["y"] is None else given["TIMES"] * given["y"]
    total: torch.Tensor = given["factor"] * given["x"].float() + y
    return torch.where(torch.arange(64) < given["n"], total, -1.0)


@pytest.mark.parametrize("changed", UNLIKE.values(), ids=UNLIKE)
def test_each_launch_gives_its_own_result(changed: dict[str, Any], posed: Posed) -> None:
    for each in ({}, {"factor": 5.0}, changed, {}, changed, {"x": X + 1}):
        out = torch.full((64,), -1.0)
        launch(out, **each)
        assert torch.equal(out, expected(**each)), each
    assert len(posed.specialised) == 2


@jit
def copy_kernel(x, y, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(y + at, x.load([0, 0]))


ROWS = torch.randn(8, 64)
DESCRIBED: dict[str, tuple[Callable[[], torch.Tensor], int]] = {
    "the same form": (lambda: torch.randn(8, 64), 1),
    "other strides": (lambda: torch.randn(8, 128)[:, :64], 1),
    "another dtype": (lambda: torch.randn(8, 64).bfloat16(), 2),
}


@pytest.mark.skipif(not HAS_DESCRIPTORS, reason="this triton makes no descriptors on the host")
@pytest.mark.parametrize(("made", "compiled"), DESCRIBED.values(), ids=DESCRIBED)
def test_descriptors_of_one_form_share_a_kernel(
    made: Callable[[], torch.Tensor], compiled: int, posed: Posed
) -> None:
    for x in (ROWS, made(), ROWS + 1):
        y = torch.zeros(4, 32, dtype=x.dtype)
        copy_kernel[(1,)](described(x, (4, 32)), y, ROWS=4, COLUMNS=32)
        assert torch.equal(y, x[:4, :32])
    assert len(posed.specialised) == compiled
