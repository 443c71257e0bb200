"""Results that are off by a little, gradients that are absent, parameters that are ignored."""

from collections.abc import Iterator
from typing import Any

import torch

from correctness_tests.support.saboteurs.base import (
    Call,
    Change,
    Saboteur,
    on_input,
    on_output,
    with_params,
)
from tinyllama.harness import Op
from tinyllama.harness.correct.checks.accuracy import EXTREMES, GRADIENTS, OUTPUTS, UNWRITTEN


def gradient_times(factor: float) -> Change:
    """The same value with a scaled gradient."""
    return lambda x: x.detach() + (x - x.detach()) * factor


def last_row_forgotten(x: torch.Tensor) -> torch.Tensor:
    """A tail that is never written: the last element of the last row stays as allocated."""
    written = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    written.view(-1)[:-1] = x.reshape(-1)[:-1]
    return written


def to_tf32(x: torch.Tensor) -> torch.Tensor:
    """Ten bits of mantissa, as a matrix unit reads float32 unless it is told otherwise."""
    if x.dtype is not torch.float32:
        return x
    cut = ((x.detach().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
    return x + (cut - x.detach())


def of_values(op: Op) -> Iterator[Saboteur]:
    def of(fault: str, call: Call, *checks: str, result: str = "", **more: Any) -> Saboteur:
        return Saboteur(op, fault, lambda: call, checks, result, **more)

    for name in op.differentiable:
        factors = {"times_1.01": 1.01}
        if name == op.differentiable[0]:  # what finds 1% of a gradient finds all of it
            factors["zero"] = 0.0
            deleted = on_input(op, name, torch.Tensor.detach)
            yield of(f"grad_{name}_deleted", deleted, GRADIENTS, reference=True)
        for fault, factor in factors.items():
            scaled = on_input(op, name, gradient_times(factor))
            result = f"grad {name}"
            yield of(f"grad_{name}_{fault}", scaled, GRADIENTS, result=result, reference=True)
    for name, output in op.outputs.items():
        scaled = on_output(op, name, lambda x: x * 1.01)
        yield of(f"{name}_times_1.01", scaled, OUTPUTS, result=name, reference=True)
        if output.axes:
            tail = on_output(op, name, last_row_forgotten)
            yield of(f"{name}_tail_forgotten", tail, UNWRITTEN, result=name)
    if "eps" in op.params:
        checks = (OUTPUTS,) if op.mutated else (OUTPUTS, GRADIENTS, EXTREMES)
        result = "param" if op.mutated else ""
        dropped = with_params(op, eps=0.0)
        yield of("epsilon_dropped", dropped, *checks, result=result, reference=True)
    if op.name in ("attention", "qkv", "swiglu", "linear_cross_entropy", "block"):
        operand = [name for name in op.differentiable if len(op.inputs[name].axes) > 1][-1]
        yield of("products_in_tf32", on_input(op, operand, to_tf32), OUTPUTS, GRADIENTS)
