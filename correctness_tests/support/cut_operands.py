"""Products in tf32 on a CPU: a stand-in for a GPU, whose matrix units cut operands of kernels, and
whose BLAS rounds them (so measured on an H100 with CUDA 13)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tinyllama.harness.kernels.tf32 import rounded_to_tf32

CUT = -0x2000  # a mask that leaves sign, exponent and the upper 10 bits of the fraction


def cut(values: Any) -> Any:
    """A float32 array, each element cut to tf32, towards zero."""
    bits = np.ascontiguousarray(values, np.float32).view(np.int32)
    return (bits & np.int32(CUT)).view(np.float32).reshape(np.shape(values))


OPERANDS = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1)}


class RoundedProducts(TorchDispatchMode):
    """The BLAS."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = list(args)
        for i in OPERANDS.get(func.overloadpacket.__name__, ()):
            if operands[i].dtype is torch.float32:
                operands[i] = rounded_to_tf32(operands[i].contiguous())
        return func(*operands, **(kwargs or {}))


@contextlib.contextmanager
def cut_operands() -> Iterator[dict[str, bool]]:
    """Meanwhile a CPU's products of float32 are in tf32. Fills in, for each kernel with such a
    product, whether the cut changed an operand: one that was not rounded before."""
    from triton.runtime import interpreter as stock

    from tinyllama.harness.kernels import interpreter

    builder = stock.InterpreterBuilder
    dot = builder.create_dot
    changed: dict[str, bool] = {}

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        if a.dtype.scalar.name == "fp32" and "TF32" in repr(rest) and "TF32x3" not in repr(rest):
            handles = a, b
            a, b = (stock.TensorHandle(cut(handle.data), handle.dtype.scalar) for handle in handles)
            kernel = interpreter.running()[0].kernel
            same = (
                np.array_equal(x.data, y.data, equal_nan=True)
                for x, y in zip(handles, (a, b), strict=True)
            )
            changed[kernel] = changed.get(kernel, False) or not all(same)
        return dot(self, a, b, *rest)

    before = torch.get_float32_matmul_precision()
    with pytest.MonkeyPatch.context() as patched, RoundedProducts():
        offered = "tinyllama.harness.kernels.precision.dot_precisions"
        patched.setattr(offered, lambda chip: ("tf32", "tf32x3", "ieee"))
        patched.setattr(builder, "create_dot", create_dot)
        torch.set_float32_matmul_precision("high")
        try:
            yield changed
        finally:
            torch.set_float32_matmul_precision(before)
