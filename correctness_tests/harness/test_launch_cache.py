"""A launch takes the kernel that was compiled for one like it, on the device of its tensors.

No GPU is needed: see `correctness_tests.support.posed`, whose compiled kernels raise an error where
an argument is not what they were compiled for.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

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
    out, given = torch.full((64,), -1.0), {**USUAL, **changed}
    x, y, factor, n = (given.pop(name) for name in ("x", "y", "factor", "n"))
    add_kernel[(64 // given["BLOCK"],)](x, y, out, factor, n, **given)
    return out


def expected(**changed: Any) -> torch.Tensor:
    given = {**USUAL, **changed}
    y = 0.0 if given["y"] is None else given["TIMES"] * given["y"]
    total: torch.Tensor = given["factor"] * given["x"].float() + y
    return torch.where(torch.arange(64) < given["n"], total, -1.0)


@pytest.mark.parametrize("changed", UNLIKE.values(), ids=UNLIKE)
def test_each_launch_gives_its_own_result(changed: dict[str, Any], posed: Posed) -> None:
    for each in ({}, {"factor": 5.0}, changed, {}, changed, {"x": X + 1}):
        assert torch.equal(result(**each), expected(**each)), each
    assert len(posed.specialised) == 2


@jit
def copy_kernel(x, y, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(y + at, x.load([0, 0]))


@pytest.mark.skipif(not HAS_DESCRIPTORS, reason="this triton makes no descriptors on the host")
def test_descriptors_of_one_form_share_a_kernel(posed: Posed) -> None:
    rows, apart, short = torch.randn(8, 64), torch.randn(8, 128)[:, :64], torch.randn(8, 64).half()
    for x, compiled in ((rows, 1), (rows + 1, 1), (apart, 1), (short, 2)):
        y = torch.zeros(4, 32, dtype=x.dtype)
        copy_kernel[(1,)](described(x, (4, 32)), y, ROWS=4, COLUMNS=32)
        assert torch.equal(y, x[:4, :32])
        assert len(posed.specialised) == compiled


# -- the device -------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The device that was current at each launch, on a machine that seems to have two."""
    current, launches = [0], []

    @contextlib.contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        before, current[0] = current[0], wanted.index
        try:
            yield
        finally:
            current[0] = before

    def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
        launches.append(current[0])

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(JITFunction, "run", run)
    return launches


class Elsewhere(torch.Tensor):
    """Says that it lies on a device, which need not be there."""

    device = torch.device("cpu")

    def get_device(self) -> int:
        return -1 if self.device.index is None else self.device.index


def launch_on(*devices: str) -> None:
    tensors = [torch.empty(8).as_subclass(Elsewhere) for _ in devices]
    for tensor, device in zip(tensors, devices, strict=True):
        tensor.device = torch.device(device)
    add_kernel[(1,)](tensors[0], tensors[0], tensors[1], 2.0, 8, TIMES=1, BLOCK=8)


def test_a_launch_is_on_the_device_of_its_tensors(launched: list[int]) -> None:
    for index in (1, 0, 1):
        launch_on(f"cuda:{index}", f"cuda:{index}")
    assert launched == [1, 0, 1]
    for devices in (("cuda:0", "cuda:1"), ("cpu", "cuda:1"), ("cuda:1", "cpu")):
        with pytest.raises(ValueError, match=f"on {devices[0]} and on {devices[1]} in one launch"):
            launch_on(*devices)
    assert launched == [1, 0, 1]
