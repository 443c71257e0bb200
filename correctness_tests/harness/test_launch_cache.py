"""A launch takes the kernel that was compiled for one like it.

No GPU is needed: see `correctness_tests.support.posed`, whose compiled kernels raise an error where
an argument is not what they were compiled for.
"""

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


def result(**changed: Any) -> torch.Tensor:
    out, named = torch.full((64,), -1.0), {**USUAL, **changed}
    x, y, factor, n = (named.pop(name) for name in ("x", "y", "factor", "n"))
    add_kernel[(64 // named["BLOCK"],)](x, y, out, factor, n, **named)
    return out


def expected(**changed: Any) -> torch.Tensor:
    named = {**USUAL, **changed}
    y = 0.0 if named["y"] is None else named["TIMES"] * named["y"]
    total: torch.Tensor = named["factor"] * named["x"].float() + y
    return torch.where(torch.arange(64) < named["n"], total, -1.0)


@pytest.mark.parametrize("changed", UNLIKE.values(), ids=UNLIKE)
def test_each_launch_gives_its_own_result(changed: dict[str, Any], posed: Posed) -> None:
    for values in ({}, {"factor": 5.0}, changed, {}, changed, {"x": X + 1}):
        assert torch.equal(result(**values), expected(**values)), values
    assert len(posed.specialised) == 2


@jit
def copy_kernel(x, y, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(y + at, x.load([0, 0]))


@pytest.mark.skipif(not HAS_DESCRIPTORS, reason="this triton makes no descriptors on the host")
def test_descriptors_of_one_form_share_a_kernel(posed: Posed) -> None:
    rows, wider, short = torch.randn(8, 64), torch.randn(8, 128)[:, :64], torch.randn(8, 64).half()
    for x, compiled in ((rows, 1), (rows + 1, 1), (wider, 1), (short, 2)):
        y = torch.zeros(4, 32, dtype=x.dtype)
        copy_kernel[(1,)](described(x, (4, 32)), y, ROWS=4, COLUMNS=32)
        assert torch.equal(y, x[:4, :32])
        assert len(posed.specialised) == compiled


def test_tensors_of_two_devices_are_refused() -> None:
    here, elsewhere = torch.empty(8), torch.empty(8, device="meta")
    with pytest.raises(ValueError, match="on cpu and on meta in one launch"):
        add_kernel[(1,)](here, None, elsewhere, 2.0, 8, TIMES=1, BLOCK=8)
