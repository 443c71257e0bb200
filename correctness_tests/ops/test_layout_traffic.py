"""What other layouts of the inputs cost in bytes: copies are made once, or strides are read.

`pytest perf_tests -m target` holds the times of each op to its bars on layouts, on a GPU. Without
one, the bytes that the launches move are held to the same bars: for ops that are bound by memory
the ratio of bytes is that of the times, where every access is as wide as for contiguous inputs.
"""

from collections.abc import Iterable

import pytest
import torch

from correctness_tests.support.launched import providers
from tinyllama.harness import Op, Provider
from tinyllama.harness.correct.evaluate import make_inputs
from tinyllama.harness.declare.autograd import several
from tinyllama.harness.kernels.launch import Launch, recorded

SECTOR = 32  # bytes: the least that an access moves
INTENSE = 100  # operations per byte: every GPU with matrix units makes more of them in that time


def bound_by_memory(op: Op) -> bool:
    """Whether the largest timed case takes as long as its bytes."""
    dims = op.timed[-1].dims
    moved, flops = (
        sum(each(*size, **dims) for each in counts.values())
        for counts, size in ((op.bytes, (2,)), (op.flops, ()))
    )
    return bool(op.differentiable and flops < INTENSE * moved)


HELD = [(op, provider) for op, provider in providers() if bound_by_memory(op)]


def launches(op: Op, provider: Provider, layout: str) -> list[Launch]:
    """Of forward and backward, on inputs of this layout and dense gradients of the outputs."""
    inputs = make_inputs(op, op.timed[0], torch.bfloat16, layout=layout)
    args = {
        name: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        for name, x in inputs.args.items()
    }
    leaves = [args[name].requires_grad_() for name in op.differentiable]
    with recorded() as found:
        outputs = several(provider.call(*args.values(), **inputs.params))
        given = [torch.empty(y.shape, dtype=y.dtype, device="meta") for y in outputs]
        torch.autograd.grad(outputs, leaves, given)
    return found


def traffic(found: Iterable[Launch]) -> int:
    """The bytes of all tensors that launches are given, with the gaps between their elements."""
    total = 0
    for launch in found:
        given = {id(x): x for x in launch.arguments.values() if isinstance(x, torch.Tensor)}
        for x in given.values():
            steps = [step for size, step in zip(x.shape, x.stride(), strict=True) if size > 1]
            step = min(steps, default=1)
            total += x.numel() * min(x.element_size() * step, SECTOR)
    return total


@pytest.mark.parametrize(("op", "provider"), HELD, ids=[str(provider) for _, provider in HELD])
def test_bytes_on_other_layouts_are_within_the_bars(op: Op, provider: Provider) -> None:
    dense = traffic(launches(op, provider, "contiguous"))
    found = {layout: traffic(launches(op, provider, layout)) for layout in op.layouts}
    for layout, bar in op.layouts.items():
        assert found[layout] <= bar * dense, f"{layout}: {found[layout] / dense:.2f} times"
    assert next(iter(found)) == max(found, key=found.__getitem__), "the gate times the first one"


def test_the_ops_that_move_memory_are_held() -> None:
    held = {op.name for op, _ in HELD}
    assert held >= {"rms_norm", "add_rms_norm", "cross_entropy", "rope", "silu_mul", "transpose"}
    assert not held & {"linear", "attention", "block"}
