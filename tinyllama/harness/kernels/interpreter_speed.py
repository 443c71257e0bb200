"""Interpreted operations made fast.

An interpreted ``a + b`` is one call of numpy. Before it, Triton makes the types of both operands
anew, finds that of the result, converts, and makes both operands blocks of one shape: most of the
time. Here

* blocks of one element and shape share a type;
* operators, conversions and ``x[:, None]`` of operands whose types need no thought call numpy at
  once, which broadcasts. Everything else, and every error, is Triton's own.

Together they take less than half of the time that Triton takes.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import semantic
from triton.runtime import interpreter as stock

Array = Any  # a numpy array

# Called before every sum of pointers and offsets, with both.
SUMS: list[Callable[[Array, Array], None]] = []
# Called for each value that is made.
COUNTS: list[Callable[[], None]] = []


# -- types that are shared --------------------------------------------------------------------

_BLOCKS: dict[Any, Any] = {}


def share_types() -> None:
    """Once in a process. Not before triton 3.4, where a shape may hold what has no hash."""
    if not hasattr(semantic, "TritonSemantic"):
        return
    block = tl.block_type
    make = block.__init__

    def new(cls: Any, *args: Any, **named: Any) -> Any:
        if cls is not block or len(args) != 2 or named:  # Gluon's types are blocks with a layout
            return object.__new__(cls)
        return _BLOCKS.get(_block_key(*args)) or object.__new__(cls)

    def init(self: Any, *args: Any, **named: Any) -> None:
        if "name" in self.__dict__:
            return
        make(self, *args, **named)
        if type(self) is block and len(args) == 2:
            _BLOCKS[_block_key(*args)] = self

    block.__new__, block.__init__ = new, init


def _block_key(element: Any, shape: Any) -> Any:
    """What tells blocks apart; pointers into several kinds of memory have one name."""
    return element.name, getattr(element, "address_space", None), *shape


_FACTS: dict[tuple[str, tuple[int, ...] | None], dict[str, Any]] = {}


def value(data: Array, kind: Any, shape: tuple[int, ...] | None = None) -> Any:
    """A tensor of elements of this type, a scalar where ``shape`` is None, without Triton's calls
    for what each tensor of its type has alike."""
    shared = _FACTS.get((kind.name, shape))
    if shared is None or kind.name == "bf16":  # which a handle rounds
        dtype = kind if shape is None else tl.block_type(kind, list(shape))
        tensor = tl.tensor(stock.TensorHandle(data, kind), dtype)
        _FACTS[kind.name, shape] = {n: fact for n, fact in vars(tensor).items() if n != "handle"}
        return tensor
    for count in COUNTS:
        count()
    handle, tensor = object.__new__(stock.TensorHandle), object.__new__(tl.tensor)
    handle.__dict__ = {"data": data, "dtype": kind, "attr": {}}
    tensor.__dict__ = {**shared, "handle": handle}
    return tensor


# -- operations -------------------------------------------------------------------------------

_FLOATS = {"fp16", "bf16", "fp32", "fp64"}
_SIGNED = {"int8", "int16", "int32", "int64"}
_INTEGERS = _SIGNED | {"uint8", "uint16", "uint32", "uint64"}
_NUMBERS = _FLOATS | _INTEGERS


def _quotient(left: Array, right: Array) -> Array:
    """The quotient of integers, rounded to zero, as the builder computes it."""
    return (left - np.fmod(left, right)) // right


# What an operator calls, for two operands of a type of one of these names.
_OPERATORS: dict[str, tuple[Callable[[Array, Array], Array], set[str]]] = {
    "add": (np.add, _NUMBERS),
    "sub": (np.subtract, _NUMBERS),
    "mul": (np.multiply, _NUMBERS),
    "truediv": (np.divide, {"fp32", "fp64"}),  # 16 bits are divided in 32
    "floordiv": (_quotient, _INTEGERS),
    "mod": (np.fmod, _INTEGERS),
    "and": (np.bitwise_and, _INTEGERS | {"int1"}),
    "or": (np.bitwise_or, _INTEGERS | {"int1"}),
    "xor": (np.bitwise_xor, _INTEGERS | {"int1"}),
}
_COMPARISONS = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}


def replacement(owner: Any, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
    """What is called for an operation of the interpreter, by its owner in the language and name."""
    if name in ("to", "cast"):
        return _cast(operation)
    if owner is tl.tensor and name == "__getitem__":
        return _index(operation)
    if owner is tl.tensor and name.startswith("__"):
        short = name.strip("_")
        if short in _COMPARISONS:
            return _binary(operation, _COMPARISONS[short], _NUMBERS, result=tl.int1)
        if short in _OPERATORS:
            return _binary(operation, *_OPERATORS[short], moves=short == "add")
        if short.startswith("r") and short[1:] in _OPERATORS:
            function, names = _OPERATORS[short[1:]]
            return _binary(operation, lambda a, b: function(b, a), names, moves=short == "radd")
    return operation


def _binary(
    operation: Callable[..., Any],
    function: Callable[[Array, Array], Array],
    names: set[str],
    result: Any = None,
    moves: bool = False,
) -> Callable[..., Any]:
    """An operator, which calls numpy at once where both operands are of one type, or integers of
    two widths, or one is a Python number that becomes of the other's type. result: the element
    type of what it gives, if that is another one. moves: a pointer may be moved by an offset."""

    def operator(a: Any, b: Any, **_: Any) -> Any:
        if stock.interpreter_builder.options.sanitize_overflow:  # Triton's own then looks, too
            return operation(a, b)
        kind = a.dtype
        pointer = moves and kind.is_ptr()
        of_tensors = type(b) is tl.tensor
        if not of_tensors:
            number = b.value if type(b) is tl.constexpr else b
            right = _constant(number, tl.int32 if pointer else kind)
        elif pointer:
            right = b.handle.data if b.dtype.name in _SIGNED else None
        else:
            kind = _common(kind, b.dtype)
            right = b.handle.data
        if right is None or kind is None or not (pointer or kind.name in names):
            return operation(a, b)
        try:
            left = a.handle.data
            data = _moved(left, right, kind) if pointer else function(left, right)
        except ValueError:  # shapes that do not fit
            return operation(a, b)
        blocks = a.type.is_block() or (of_tensors and b.type.is_block())
        return value(data, result or kind, data.shape if blocks else None)

    return operator


def _common(left: Any, right: Any) -> Any:
    """The type in which operands of these types are computed; None where that takes thought."""
    if left.name == right.name:
        return left
    if left.name in _SIGNED and right.name in _SIGNED:
        return max(left, right, key=lambda kind: kind.primitive_bitwidth)
    return None


def _moved(pointers: Array, offsets: Array, kind: Any) -> Array:
    for see in SUMS:
        see(*np.broadcast_arrays(pointers, offsets))
    size = max(1, kind.element_ty.primitive_bitwidth // 8)
    return pointers + size * offsets.astype(np.uint64)


def _constant(number: Any, kind: Any) -> Array | None:
    """A Python number as a value of this type beside it; None where it does not become one."""
    if not isinstance(number, (int, float)):
        return None
    if kind.name in _FLOATS:
        data = np.array([number], stock._get_np_dtype(kind))
        return data if kind.name != "bf16" else stock.TensorHandle(data, kind).data
    if kind.name not in _INTEGERS or isinstance(number, float):
        return None
    limits = np.iinfo(stock._get_np_dtype(kind))
    return np.array([number], limits.dtype) if limits.min <= number <= limits.max else None


def _index(operation: Callable[..., Any]) -> Callable[..., Any]:
    """``x[:, None]`` of blocks."""

    def index(a: Any, slices: Any, **_: Any) -> Any:
        adds_axes = type(slices) is tuple and all(
            part is None or (type(part) is slice and part == slice(None)) for part in slices
        )
        if not adds_axes or slices.count(slice(None)) != a.handle.data.ndim:
            return operation(a, slices)
        data = a.handle.data[slices]
        return value(data, a.dtype, data.shape) if a.type.is_block() else operation(a, slices)

    return index


def _cast(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Conversions of numbers, which are one call of the builder."""

    def cast(a: Any, dtype: Any, *rest: Any, **named: Any) -> Any:
        named.pop("_semantic", None)
        named.pop("_builder", None)
        if rest or named or type(a) is not tl.tensor or type(dtype) is not tl.dtype:
            return operation(a, dtype, *rest, **named)
        if a.dtype.name == dtype.name:
            return a
        if dtype.name not in _NUMBERS or a.dtype.name not in _NUMBERS | {"int1"}:
            return operation(a, dtype)
        handle = stock.interpreter_builder.cast_impl(a.handle, dtype)
        return tl.tensor(
            handle, tl.block_type(dtype, list(a.type.shape)) if a.type.is_block() else dtype
        )

    return cast
