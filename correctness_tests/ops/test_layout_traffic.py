"""What other layouts of the inputs cost in bytes: copies are made once, or strides are read.

`pytest perf_tests -m target` holds the times of each op to its bars on layouts, on a GPU. Without
one, the bytes that the launches move are held to the same bars: for ops that are bound by memory
the ratio of bytes is that of the times, where every access is as wide as for contiguous inputs.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from correctness_tests.support.launched import providers
from tinyllama.harness import Op, Provider
from tinyllama.harness.check.evaluate import make_inputs
from tinyllama.harness.declare.autograd import several
from tinyllama.harness.kernels.copying import dense_kernel
from tinyllama.harness.kernels.launch import Launch, recorded

SECTOR = 32  # bytes: the least that an access moves
INTENSE = 100  # operations per byte: every GPU with matrix units makes more of them in that time


def bound_by_memory(op: Op) -> bool:
    """Whether the largest timed case takes as long as its bytes."""
    dims = op.timed[-1].dims
    moved, flops = (
        sum(count(*size, **dims) for count in counts.values())
        for counts, size in ((op.bytes, (2,)), (op.flops, ()))
    )
    return bool(op.differentiable and flops < INTENSE * moved)


class TorchsCopies(TorchDispatchMode):
    """Counts torch's operators that copy, by name."""

    NAMES = ("copy_", "clone", "cat", "stack", "_to_copy")

    def __init__(self) -> None:
        super().__init__()
        self.copies: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        self.copies.update([name] if name in self.NAMES else [])
        return function(*args, **(kwargs or {}))


HELD = [(op, provider) for op, provider in providers() if bound_by_memory(op)]


def launches(op: Op, provider: Provider, layout: str) -> list[Launch]:
    """Of forward and backward, on inputs of this layout and dense gradients of the outputs."""
    return copying(op, provider, layout)[0]


def copying(op: Op, provider: Provider, layout: str) -> tuple[list[Launch], Counter[str]]:
    """The launches, and torch's own copies."""
    inputs = make_inputs(op, op.timed[0], torch.bfloat16, layout=layout)
    args = {
        name: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        for name, x in inputs.args.items()
    }
    leaves = [args[name].requires_grad_() for name in op.differentiable]
    with recorded() as launches, TorchsCopies() as torchs:
        outputs = several(provider.call(*args.values(), **inputs.params))
        upstream = [torch.empty(y.shape, dtype=y.dtype, device="meta") for y in outputs]
        torch.autograd.grad(outputs, leaves, upstream)
    return launches, torchs.copies


def traffic(launches: Iterable[Launch]) -> int:
    """The bytes of all tensors that launches are given, with the gaps between their elements."""
    total = 0
    for launch in launches:
        tensors = {id(x): x for x in launch.arguments.values() if isinstance(x, torch.Tensor)}
        for x in tensors.values():
            steps = [step for size, step in zip(x.shape, x.stride(), strict=True) if size > 1]
            step = min(steps, default=1)
            total += x.numel() * min(x.element_size() * step, SECTOR)
    return total


@pytest.mark.parametrize(("op", "provider"), HELD, ids=[str(provider) for _, provider in HELD])
def test_bytes_on_other_layouts_are_within_the_bars(op: Op, provider: Provider) -> None:
    dense = traffic(launches(op, provider, "contiguous"))
    bytes_of = {layout: traffic(launches(op, provider, layout)) for layout in op.layouts}
    for layout, bar in op.layouts.items():
        assert bytes_of[layout] <= bar * dense, f"{layout}: {bytes_of[layout] / dense:.2f} times"
    assert next(iter(bytes_of)) == max(bytes_of, key=bytes_of.__getitem__), (
        "the gate times the first one"
    )


TIMED = [(op, provider) for op, provider in providers() if op.timed and op.differentiable]


@pytest.mark.parametrize(("op", "provider"), TIMED, ids=[str(provider) for _, provider in TIMED])
def test_no_input_is_copied_twice_or_by_torch(op: Op, provider: Provider) -> None:
    """A copy serves both passes. Torch's reads a transposed tensor by single elements."""
    _, usual_copies = copying(op, provider, "contiguous")
    for layout in op.layouts:
        launches, torchs = copying(op, provider, layout)
        copied = (launch.arguments["x"] for launch in launches if launch.kernel is dense_kernel)
        times = Counter(x.untyped_storage()._cdata for x in copied)
        assert set(times.values()) <= {1}, f"{layout}: copies of each tensor {[*times.values()]}"
        assert torchs == usual_copies, f"{layout}: torch copies as well"
