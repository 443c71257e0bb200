"""Interpreted operations made fast: what follows from the types of operands is found once.

An interpreted ``a + b`` is one call of numpy. Before it, Triton makes the types of both operands
anew, finds that of the result, converts, and makes both operands blocks of one shape: most of the
time. Here

* blocks of one element and shape share a type, and tensors of a type share what follows from it;
* an operator, a conversion or ``x[:, None]`` is Triton's own for the first operands of their types
  (or of one number). The builder notes the one call of numpy that it ends in; from then on that
  call is made at once, and numpy broadcasts.

An operation is remembered only if this gives what Triton's own gave, bit for bit. Errors are never
remembered, so they are Triton's own. Together this takes a third of the time that Triton takes.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import semantic
from triton.runtime import interpreter as stock

from tinyllama.harness.kernels.launch_cache import among

Array = Any  # a numpy array

MOST = 4096  # types, and operations of each operator, that are remembered
# Called before every sum of pointers and offsets, with both.
SUMS: list[Callable[[Array, Array], None]] = []
# Called for each value that is made.
COUNTS: list[Callable[[], None]] = []


# -- types that are shared --------------------------------------------------------------------

_BLOCKS: dict[Any, Any] = {}
_SHAPES: dict[tuple[int, ...], Any] = {}
_POINTERS: dict[tuple[str, Any], Any] = {}


def share_types() -> None:
    """Once in a process. Not before triton 3.4, where a shape may hold what has no hash."""
    if hasattr(semantic, "TritonSemantic"):
        _share_blocks()
        _share_shapes()
        _leave_equal_blocks(semantic.TritonSemantic)


def _share_blocks() -> None:
    block = tl.block_type
    make = block.__init__

    def new(cls: Any, *args: Any, **named: Any) -> Any:
        if cls is not block or len(args) != 2 or named:
            return object.__new__(cls)
        key = id(args[0]), *args[1]  # a type that is shared keeps its element type, and so its id
        shared = _BLOCKS.get(key)
        return object.__new__(cls) if shared is None else shared

    def init(self: Any, *args: Any, **named: Any) -> None:
        if "name" in self.__dict__:
            return
        make(self, *args, **named)
        if type(self) is block and len(args) == 2:  # Gluon's types are blocks with a layout
            _remember(_BLOCKS, (id(args[0]), *args[1]), self)
        self.shape = _SHAPES.setdefault(tuple(self.shape), self.shape)

    block.__new__, block.__init__ = new, init


def _share_shapes() -> None:
    make = tl.tensor.__init__

    def init(self: Any, handle: Any, type: Any) -> None:
        shared = type.__dict__.get("_of_tensors")
        if shared is None:
            make(self, handle, type)
            type._of_tensors = {n: value for n, value in vars(self).items() if n != "handle"}
        else:
            self.__dict__.update(shared)
            self.handle = handle

    tl.tensor.__init__ = init


def _leave_equal_blocks(owner: Any) -> None:
    broadcast = owner.broadcast_impl_value

    def broadcast_unless_equal(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and left.shape is right.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    owner.broadcast_impl_value = broadcast_unless_equal


def pointer(argument: Any) -> Any:
    """A kernel's argument that is a pointer, of the one type that pointers like it share."""
    kind = argument.type
    argument.handle.dtype = shared = _POINTERS.setdefault((kind.name, kind.address_space), kind)
    return tl.tensor(argument.handle, shared)


def value(data: Array, dtype: Any, kind: Any) -> Any:
    """``tl.tensor(TensorHandle(data, dtype), kind)``, without calls; a bfloat16 must be rounded
    already."""
    shared = kind.__dict__.get("_of_tensors")
    if shared is None:
        return tl.tensor(stock.TensorHandle(data, dtype), kind)
    for count in COUNTS:
        count()
    handle, tensor = object.__new__(stock.TensorHandle), object.__new__(tl.tensor)
    handle.__dict__ = {"data": data, "dtype": dtype, "attr": {}}
    tensor.__dict__ = {**shared, "handle": handle}
    return tensor


# -- what the builder notes -------------------------------------------------------------------

# What an operation ended in: both handles, what it called, and its result. A list while noted.
_NOTES: list[list[tuple[Any, Any, Any, Any]]] = []
ADD_POINTER = object()  # stands for the builder's sum of a pointer and an offset
CAST = object()  # stands for a conversion: its handle, the type it becomes


def note(left: Any, right: Any, called: Any, result: Any) -> None:
    """The builder has made an operation of two handles."""
    if _NOTES:
        _NOTES[-1].append((left, right, called, result))


def _noted(operation: Callable[..., Any], *operands: Any) -> tuple[Any, list[Any]]:
    """The result of an operation, and what the builder noted meanwhile."""
    with among(_NOTES, list[Any]()) as notes:
        return operation(*operands), notes


def divided(left: Array, right: Array) -> Array:
    """The quotient of integers, rounded to zero, as the builder computes it."""
    return (left - np.fmod(left, right)) // right


# -- operations that are remembered -----------------------------------------------------------

_REFLECTED = {f"__r{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod")}
_OPERATORS = _REFLECTED | {
    *("__add__", "__sub__", "__mul__", "__truediv__", "__floordiv__", "__mod__"),
    *("__and__", "__or__", "__xor__"),
    *("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"),
}


def replacement(owner: Any, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
    """What is called for an operation of the interpreter, by its owner in the language and name."""
    if owner is tl.tensor and name in _OPERATORS:
        return _binary(name in _REFLECTED, operation)
    if owner is tl.tensor and name == "__getitem__":
        return _index(operation)
    if name in ("to", "cast"):
        return _cast(operation)
    return operation


def _remember(facts: dict[Any, Any], key: Any, fact: Any) -> None:
    if len(facts) >= MOST:
        facts.clear()
    facts[key] = fact


def _index(operation: Callable[..., Any]) -> Callable[..., Any]:
    """``x[:, None]`` of blocks."""
    types: dict[Any, tuple[Any, Any]] = {}

    def index(a: Any, slices: Any, **_: Any) -> Any:
        adds_axes = type(slices) is tuple and all(
            part is None or (type(part) is slice and part == slice(None)) for part in slices
        )
        if not adds_axes or not a.type.is_block():
            return operation(a, slices)
        key = (id(a.type), tuple(part is None for part in slices))
        if key in types:
            return value(a.handle.data[slices], a.handle.dtype, types[key][0])
        result = operation(a, slices)
        if _same(a.handle.data[slices], result.handle.data):
            _remember(types, key, (result.type, a.type))
        return result

    return index


def _cast(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Conversions that are one call of the builder, or none."""
    types: dict[Any, tuple[Any, Any, Any]] = {}

    def cast(a: Any, dtype: Any, *rest: Any, **named: Any) -> Any:
        named.pop("_semantic", None)
        named.pop("_builder", None)
        if rest or named or type(a) is not tl.tensor or type(dtype) is not tl.dtype:
            return operation(a, dtype, *rest, **named)
        key = (id(a.type), dtype.name)
        if key in types:
            kind, target, _ = types[key]
            if kind is None:
                return a
            return tl.tensor(stock.interpreter_builder.cast_impl(a.handle, target), kind)
        result, notes = _noted(operation, a, dtype)
        if result is a and not notes:
            _remember(types, key, (None, None, a.type))
        elif len(notes) == 1 and notes[0][2] is CAST:
            source, target, _, converted = notes[0]
            if source is a.handle and converted is result.handle:
                _remember(types, key, (result.type, target, a.type))
        return result

    return cast


def _binary(reflected: bool, operation: Callable[..., Any]) -> Callable[..., Any]:
    operations: dict[Any, _Operation] = {}

    def first(a: Any, b: Any, key: Any) -> Any:
        result, notes = _noted(operation, a, b)
        if not isinstance(result, tl.tensor):
            return result
        call = _operation(reflected, a, b, notes, result)
        if call is not None:
            again = call(a.handle.data, b.handle.data if call.constant is None else call.constant)
            if _same(again.handle.data, result.handle.data):
                _remember(operations, key, call)
                return again  # sums later on are in the order of what is remembered
        return result

    def operator(a: Any, b: Any, **_: Any) -> Any:
        if stock.interpreter_builder.options.sanitize_overflow:  # Triton's own then looks, too
            return operation(a, b)
        kind = type(b)
        if kind is tl.tensor:
            call = operations.get((id(a.type), id(b.type)))
            if call is not None:
                return call(a.handle.data, b.handle.data)
            return first(a, b, (id(a.type), id(b.type)))
        number = b.value if kind is tl.constexpr else b
        kind = type(number)
        if kind is not float and kind is not bool:
            if not isinstance(number, int):
                return operation(a, b)
            kind = int  # a loop variable's, too
        key = id(a.type), kind, number.hex() if kind is float else number
        call = operations.get(key)
        return first(a, b, key) if call is None else call(a.handle.data, call.constant)

    return operator


class _Operation:
    """What an operator does with operands of two types. types: what the ids in its key stand for.
    constant: the second operand, where it is a number."""

    def __init__(self, note: Any, kind: Any, swapped: bool, types: Any, constant: Any) -> None:
        left, right, self.called, result = note
        self.swapped, self.type, self.dtype = swapped, kind, result.dtype
        self.types, self.constant = types, constant
        self.result = np.asarray(result.data).dtype
        self.left, self.right = left.data.dtype, right.data.dtype
        self.size = 0
        if self.called is ADD_POINTER:
            self.size = max(1, left.get_element_ty().primitive_bitwidth // 8)
        self.rounds = self.dtype.scalar.name == "bf16"

    def __call__(self, a: Any, b: Any) -> Any:
        left, right = (b, a) if self.swapped else (a, b)
        if left.dtype is not self.left:
            left = left.astype(self.left, copy=False)
        if right.dtype is not self.right:
            right = right.astype(self.right, copy=False)
        if self.size:
            for see in SUMS:
                see(*np.broadcast_arrays(left, right))
            data = left + self.size * right.astype(np.uint64)
        else:
            data = self.called(left, right)
            if data.itemsize > self.result.itemsize:
                data = data.astype(self.result)
        if self.rounds:
            return tl.tensor(stock.TensorHandle(data, self.dtype), self.type)
        return value(data, self.dtype, self.type)


def _operation(reflected: bool, a: Any, b: Any, notes: Any, result: Any) -> _Operation | None:
    """What is remembered of an operation of a tensor and a tensor or number; None for nothing."""
    notes = [note for note in notes if note[2] is not CAST]  # of operands: see `_converts`
    if len(notes) != 1 or notes[0][3] is not result.handle:
        return None
    left, right, called, _ = notes[0]
    if (called is ADD_POINTER) != result.type.scalar.is_ptr():
        return None
    swapped = reflected
    if called is ADD_POINTER:  # the pointer comes first
        swapped = not a.type.scalar.is_ptr()
    first, second = (right, left) if swapped else (left, right)
    bits = left.data.dtype == right.data.dtype == np.bool_
    if bits and called in (np.add, np.subtract, np.multiply, np.fmod):
        return None  # one bit, which wraps around or gets another dtype
    of_tensors = isinstance(b, tl.tensor)
    if not _converts(a, first) or (of_tensors and not _converts(b, second)):
        return None
    types = (a.type, b.type) if of_tensors else a.type
    constant = None if of_tensors else second.data.reshape(-1)[:1].copy()
    return _Operation(notes[0], result.type, swapped, types, constant)


def _converts(value: Any, handle: Any) -> bool:
    """Whether an operand becomes what the builder got by ``astype`` alone, or by nothing."""
    source, target = value.type.scalar, handle.dtype.scalar
    if source.name == target.name:
        return bool(value.handle.data.dtype == handle.data.dtype)
    kinds = {value.handle.data.dtype.kind, handle.data.dtype.kind}
    special = any(kind.is_ptr() or kind.is_fp8() for kind in (source, target))
    return not special and target.name not in ("bf16", "int1") and kinds <= {*"biuf"}


def _same(left: Any, right: Any) -> bool:
    left, right = np.asarray(left), np.asarray(right)
    alike = left.dtype == right.dtype and left.shape == right.shape
    return bool(alike and left.tobytes() == right.tobytes())
