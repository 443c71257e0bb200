"""Operators of interpreted values, remembered: what Triton decides about types is decided once.

An interpreted ``a + b`` is one call of numpy. Before it, Triton finds the types of both operands
and of the result, converts, and makes both operands blocks of one shape. All this follows from the
types of the operands, or from the value of one that is a Python number. So the first operation on
such operands is Triton's own, and the builder notes the one call that it ends in. From then on that
call is made at once; numpy broadcasts.

So are a choice between two operands, a block of one number, and a load or store whose mask and
pointers have one shape, or whose mask is spread over the pointers.

An operation is remembered only if what is remembered gives what Triton's own operation gave, bit
for bit. Errors are never remembered, so that they are always Triton's own.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as stock

from tinyllama.harness.kernels.accesses import load_of, store_of
from tinyllama.harness.kernels.builder_notes import (
    ADD_POINTER,
    CAST,
    CHOICE,
    MOST,
    Array,
    converts,
    same,
    value,
    watched,
)

# Called before every sum of pointers and offsets, with both.
SUMS: list[Callable[[Array, Array], None]] = []

_DESCRIPTOR = getattr(tl.core, "tensor_descriptor_base", None)
_WHOLE = slice(None)
_REFLECTED = {f"__r{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod")}
NAMES = _REFLECTED | {
    *("__add__", "__sub__", "__mul__", "__truediv__", "__floordiv__", "__mod__"),
    *("__and__", "__or__", "__xor__"),
    *("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"),
}


def divided(left: Array, right: Array) -> Array:
    """The quotient of integers, rounded to zero, as the builder computes it."""
    return (left - np.fmod(left, right)) // right


class _Operation:
    """What an operator does with operands of two types; ``keep``: holds what ids stand for."""

    def __init__(self, noted: tuple[Any, Any, Any, Any], result: Any, swapped: bool) -> None:
        left, right, self.called, made = noted
        self.swapped, self.type, self.dtype = swapped, result.type, made.dtype
        self.most = np.asarray(made.data).itemsize
        self.made = np.asarray(made.data).dtype
        self.left, self.right = left.data.dtype, right.data.dtype
        self.size = 0
        if self.called is ADD_POINTER:
            self.size = max(1, left.get_element_ty().primitive_bitwidth // 8)
        self.constant: Any = None
        self.keep: Any = None
        self.rounds = self.dtype.scalar.name == "bf16"

    def __call__(self, a: Any, b: Any) -> Any:
        left, right = (b, a) if self.swapped else (a, b)
        if left.dtype is not self.left:
            left = left.astype(self.left, copy=False)
        if right.dtype is not self.right:
            right = right.astype(self.right, copy=False)
        if self.size:
            for seen in SUMS:
                seen(*np.broadcast_arrays(left, right))
            data = left + self.size * right.astype(np.uint64)
        else:
            data = self.called(left, right)
            if data.itemsize > self.most:
                data = data.astype(self.made)
        if self.rounds:
            return tl.tensor(stock.TensorHandle(data, self.dtype), self.type)
        return value(data, self.dtype, self.type)


def _operation(name: str, a: Any, b: Any, noted: list[Any], result: Any) -> _Operation | None:
    noted = [one for one in noted if one[2] is not CAST]  # of operands: see `converts`
    if len(noted) != 1 or noted[0][3] is not result.handle:
        return None
    left, right, called, _ = noted[0]
    if (called is ADD_POINTER) != result.type.scalar.is_ptr():
        return None
    swapped = name in _REFLECTED
    if called is ADD_POINTER:  # the pointer comes first
        swapped = not a.type.scalar.is_ptr()
    first, second = (right, left) if swapped else (left, right)
    if not converts(a, first):
        return None
    bits = left.data.dtype == right.data.dtype == np.bool_
    if bits and called in (np.add, np.subtract, np.multiply, np.fmod):
        return None  # one bit, which wraps around or gets another dtype
    found = _Operation(noted[0], result, swapped)
    if isinstance(b, tl.tensor):
        if not converts(b, second):
            return None
        found.keep = a.type, b.type
    else:
        found.keep = a.type
        found.constant = second.data.reshape(-1)[:1].copy()
    return found


def replacement(owner: Any, name: str, stock_operator: Callable[..., Any]) -> Callable[..., Any]:
    """What is called for a builtin of the language, by its owner and name, while one interprets."""
    if owner is tl.tensor and name in NAMES:
        return _binary(name, stock_operator)
    if owner is tl.tensor and name == "__getitem__":
        return _index(stock_operator)
    if name in ("to", "cast"):
        return _cast(stock_operator)
    if name == "arange":
        return _arange(stock_operator)
    if name == "full":
        return _full(stock_operator)
    if name == "where":
        return _where(stock_operator)
    if name == "load" and owner is not _DESCRIPTOR:
        return load_of(stock_operator)
    if name == "store" and owner is not _DESCRIPTOR:
        return store_of(stock_operator)
    return stock_operator


def _index(stock_operator: Callable[..., Any]) -> Callable[..., Any]:
    """``x[:, None]`` of blocks."""
    known: dict[Any, tuple[Any, Any]] = {}

    def index(a: Any, slices: Any, **_: Any) -> Any:
        plain = type(slices) is tuple and all(
            one is None or (type(one) is slice and one == _WHOLE) for one in slices
        )
        if not plain or not a.type.is_block():
            return stock_operator(a, slices)
        key = (id(a.type), tuple(one is None for one in slices))
        found = known.get(key)
        if found is not None:
            return value(a.handle.data[slices], a.handle.dtype, found[0])
        result = stock_operator(a, slices)
        if same(a.handle.data[slices], result.handle.data):
            if len(known) >= MOST:
                known.clear()
            known[key] = result.type, a.type
        return result

    return index


def _cast(stock_operator: Callable[..., Any]) -> Callable[..., Any]:
    """Conversions that are one call of the builder, or none."""
    known: dict[Any, tuple[Any, Any, Any]] = {}
    builder = stock.interpreter_builder

    def cast(a: Any, dtype: Any, *rest: Any, **named: Any) -> Any:
        named.pop("_semantic", None)
        named.pop("_builder", None)
        if rest or named or type(a) is not tl.tensor or type(dtype) is not tl.dtype:
            return stock_operator(a, dtype, *rest, **named)
        key = (id(a.type), dtype.name)
        found = known.get(key)
        if found is not None:
            kind, target, _ = found
            if kind is None:
                return a
            return tl.tensor(builder.cast_impl(a.handle, target), kind)
        result, noted = watched(stock_operator, a, dtype)
        if len(known) >= MOST:
            known.clear()
        if result is a and not noted:
            known[key] = None, None, a.type
        elif len(noted) == 1 and noted[0][2] is CAST:
            source, target, _, made = noted[0]
            if source is a.handle and made is result.handle:
                known[key] = result.type, target, a.type
        return result

    return cast


def _key(operand: Any) -> Any:
    """What a tensor's type, or a number, has in common with those that are treated like it; None
    for what is neither."""
    if type(operand) is tl.tensor:
        return id(operand.type)
    number = operand.value if type(operand) is tl.constexpr else operand
    if type(number) is float:
        return float, number.hex()
    if type(number) is bool:
        return bool, number
    return (int, int(number)) if isinstance(number, int) else None


class _Choice:
    """What ``where`` does with a condition and operands of some types; ``keep``: what ids stand
    for."""

    def __init__(self, noted: tuple[Any, Any, Any, Any], operands: Any, kind: Any) -> None:
        _, given, _, made = noted
        self.dtype, self.kind = made.dtype, kind
        self.keep = [getattr(one, "type", None) for one in operands]
        self.made = [handle.data.dtype for handle in given]
        self.constants = [
            None if type(one) is tl.tensor else handle.data.reshape(-1)[:1].copy()
            for one, handle in zip(operands[1:], given, strict=True)
        ]

    def __call__(self, condition: Any, *operands: Any) -> Any:
        one, other = (
            operand.handle.data.astype(made, copy=False) if constant is None else constant
            for operand, made, constant in zip(operands, self.made, self.constants, strict=True)
        )
        data = np.where(condition.handle.data, one, other)
        return value(data, self.dtype, self.kind)


def _where(stock_operator: Callable[..., Any]) -> Callable[..., Any]:
    """Choices by a block or scalar of int1."""
    known: dict[Any, _Choice] = {}

    def first(key: Any, *operands: Any) -> Any:
        result, noted = watched(stock_operator, *operands)
        if len(known) >= MOST:
            known.clear()
        if len(noted) and noted[-1][2] is CHOICE and noted[-1][3] is result.handle:
            pairs = zip(operands[1:], noted[-1][1], strict=True)
            if all(type(one) is not tl.tensor or converts(one, handle) for one, handle in pairs):
                found = _Choice(noted[-1], operands, result.type)
                if same(found(*operands).handle.data, result.handle.data):
                    known[key] = found
        return result

    def where(condition: Any, x: Any, y: Any, *rest: Any, **named: Any) -> Any:
        named.pop("_semantic", None)
        named.pop("_builder", None)
        of_bits = type(condition) is tl.tensor and condition.type.scalar is tl.int1
        keys = _key(x), _key(y)
        if rest or named or not of_bits or None in keys:
            return stock_operator(condition, x, y, *rest, **named)
        key = (id(condition.type), *keys)
        found = known.get(key)
        return first(key, condition, x, y) if found is None else found(condition, x, y)

    return where


def _full(stock_operator: Callable[..., Any]) -> Callable[..., Any]:
    """A block of one number."""
    known: dict[Any, tuple[Any, Any, Any]] = {}

    def full(shape: Any, number: Any, dtype: Any, *rest: Any, **named: Any) -> Any:
        named.pop("_semantic", None)
        named.pop("_builder", None)
        sizes = tuple(getattr(size, "value", size) for size in shape) if _listed(shape) else None
        usual = sizes is not None and all(type(size) is int for size in sizes)
        key = None if type(number) is tl.tensor else _key(number)
        if rest or named or not usual or key is None or type(dtype) is not tl.dtype:
            return stock_operator(shape, number, dtype, *rest, **named)
        key = (sizes, key, dtype.name)
        if key not in known:
            result = stock_operator(shape, number, dtype)
            if len(known) >= MOST:
                known.clear()
            if not result.type.is_block():
                return result
            data = result.handle.data
            known[key] = data.reshape(-1)[:1].copy(), result.handle.dtype, result.type
        first, element, kind = known[key]
        return value(np.repeat(first, kind.numel).reshape(sizes), element, kind)

    return full


def _listed(shape: Any) -> bool:
    return isinstance(shape, (list, tuple, tl.tuple))


def _arange(stock_operator: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[tuple[int, int], Any] = {}

    def arange(start: Any, end: Any, **named: Any) -> Any:
        start = start.value if type(start) is tl.constexpr else start
        end = end.value if type(end) is tl.constexpr else end
        if type(start) is not int or type(end) is not int:
            return stock_operator(start, end)
        kind = known.get((start, end))
        if kind is None:
            kind = known[start, end] = stock_operator(start, end).type
        data = np.arange(start, end, dtype=np.int32)
        return value(data, tl.int32, kind)

    return arange


def _binary(name: str, stock_operator: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[Any, _Operation] = {}

    def first(a: Any, b: Any, key: Any) -> Any:
        result, noted = watched(stock_operator, a, b)
        if len(known) >= MOST:
            known.clear()
        found = None
        if isinstance(result, tl.tensor):
            value = b.value if isinstance(b, tl.constexpr) else b
            found = _operation(name, a, value, noted, result)
        if found is not None:
            constant = found.constant
            again = found(a.handle.data, b.handle.data if constant is None else constant)
            if same(again.handle.data, result.handle.data):
                result = again  # sums later on are in the order of what is remembered
            else:
                found = None
        if found is not None:
            known[key] = found
        return result

    def operator(a: Any, b: Any, **_: Any) -> Any:
        if stock.interpreter_builder.options.sanitize_overflow:  # the stock one then looks, too
            return stock_operator(a, b)
        kind = type(b)
        if kind is tl.tensor:
            key: Any = (id(a.type), id(b.type))
            found = known.get(key)
            if found is not None:
                return found(a.handle.data, b.handle.data)
        else:
            value = b.value if kind is tl.constexpr else b
            kind = type(value)
            if kind is float:
                value = value.hex()
            elif kind is not int and kind is not bool:
                if not isinstance(value, int):
                    return stock_operator(a, b)
                kind = int  # a loop variable
            key = (id(a.type), kind, value)
            found = known.get(key)
            if found is not None:
                return found(a.handle.data, found.constant)
        return first(a, b, key)

    return operator
