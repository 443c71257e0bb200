"""What the builder notes of an interpreted operation, and a value made without calls.

The builder of the interpreter notes each call that an operation ends in. What is remembered of an
operation (`operators`, `accesses`) is made from that.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as stock

from tinyllama.harness.kernels.known import among

Array = Any  # a numpy array

MOST = 4096  # operations that are kept for each operator
# What an operator ended in: both handles, what it called, and its result. A list while noted.
NOTED: list[list[tuple[Any, Any, Any, Any]]] = []
# Called for each value that is made.
COUNTS: list[Callable[[], None]] = []
ADD_POINTER = object()  # stands for the builder's sum of a pointer and an offset
CAST = object()  # stands for a conversion: its handle, the type it becomes
LOAD = object()  # stands for a load: its pointers, and its mask, default and other arguments
STORE = object()  # stands for a store: its pointers, and its value, mask and other arguments
CHOICE = object()  # stands for a choice: its condition, and both operands


def note(left: Any, right: Any, called: Any, result: Any) -> None:
    """The builder has made an operation of two handles."""
    if NOTED:
        NOTED[-1].append((left, right, called, result))


def watched(stock_operator: Callable[..., Any], *operands: Any) -> tuple[Any, list[Any]]:
    """The result of an operation, and what the builder noted meanwhile."""
    with among(NOTED, list[Any]()) as noted:
        return stock_operator(*operands), noted


def value(data: Array, dtype: Any, kind: Any) -> Any:
    """``tl.tensor(TensorHandle(data, dtype), kind)``, without calls; a bfloat16 must be rounded
    already."""
    shared = kind.__dict__.get("_of_tensors")  # from `shared_types`
    if shared is None:
        return tl.tensor(stock.TensorHandle(data, dtype), kind)
    for count in COUNTS:
        count()
    handle, made = _new(_HANDLE), _new(_TENSOR)
    handle.__dict__ = {"data": data, "dtype": dtype, "attr": {}}
    made.__dict__ = {**shared, "handle": handle}
    return made


_new, _HANDLE, _TENSOR = object.__new__, stock.TensorHandle, tl.tensor


def converts(value: Any, handle: Any) -> bool:
    """Whether an operand becomes what the builder got by ``astype`` alone, or by nothing."""
    scalar = value.type.scalar
    if scalar.name == handle.dtype.scalar.name:
        return bool(value.handle.data.dtype == handle.data.dtype)
    kinds = value.handle.data.dtype.kind, handle.data.dtype.kind
    exact = "biuf"  # not pointers, 8-bit floats and what is rounded to bfloat16
    return (
        not scalar.is_ptr()
        and not scalar.is_fp8()
        and handle.dtype.scalar.name not in ("bf16", "int1")
        and not handle.dtype.is_ptr()
        and not handle.dtype.is_fp8()
        and all(kind in exact for kind in kinds)
    )


def same(left: Any, right: Any) -> bool:
    left, right = np.asarray(left), np.asarray(right)
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and left.tobytes() == right.tobytes()
    )
