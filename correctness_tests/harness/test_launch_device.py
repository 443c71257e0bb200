"""A kernel is launched on the device of its tensors, whichever device is the current one."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from tinyllama.harness.kernels.launch import jit, tl
from tinyllama.ops import OPS


@jit
def double(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The device that was current at each launch, on a machine that seems to have two."""
    now, launched = [0], []

    @contextlib.contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        before, now[0] = now[0], wanted.index
        try:
            yield
        finally:
            now[0] = before

    def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
        launched.append(now[0])

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: now[0])
    monkeypatch.setattr(JITFunction, "run", run)
    return launched


class Elsewhere(torch.Tensor):
    """Says that it lies on a device; none is asked whether it is there, and there may be one."""

    device = torch.device("cpu")

    def get_device(self) -> int:
        return -1 if self.device.index is None else self.device.index


def on(*devices: str) -> list[Elsewhere]:
    tensors = [torch.empty(8).as_subclass(Elsewhere) for _ in devices]
    for tensor, device in zip(tensors, devices, strict=True):
        tensor.device = torch.device(device)
    return tensors


def test_a_launch_is_on_the_device_of_its_tensors(seen: list[int]) -> None:
    for index in (1, 0, 1):
        x, y = on(f"cuda:{index}", f"cuda:{index}")
        double[(1,)](x, y, 8, BLOCK=8)
    assert seen == [1, 0, 1]
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("devices", [("cuda:0", "cuda:1"), ("cpu", "cuda:1"), ("cuda:1", "cpu")])
def test_tensors_of_several_devices_are_refused_before_a_launch(
    devices: tuple[str, str], seen: list[int]
) -> None:
    with pytest.raises(ValueError, match=f"on {devices[0]} and on {devices[1]} in one launch"):
        double[(1,)](*on(*devices), 8, BLOCK=8)
    assert seen == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["rms_norm", "cross_entropy", "silu_mul"])
def test_an_op_on_another_gpu_is_right(name: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("it needs two GPUs")
    from tinyllama.harness.check.cases import OpCase
    from tinyllama.harness.check.evaluate import evaluate

    op = OPS[name]
    case = OpCase(op, op["triton"], op.timed[1], torch.bfloat16)
    inputs = case.inputs("cuda:1")
    found = evaluate(op, op["triton"].call, inputs)
    assert all(value.device == torch.device("cuda:1") for value in found.values())
    assert not [str(one) for one in case.judge(found, inputs) if not one.passed]
