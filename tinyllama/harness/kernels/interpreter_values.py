"""Values and accesses of Triton's interpreter, made honest: what
`tinyllama.harness.kernels.interpreter` says of bfloat16, comparisons, products and arguments; and
what watches the accesses of a launch.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as stock

from tinyllama.harness.kernels import compiler_hints, interpreter_speed, libdevice, programs

Array = Any  # a numpy array

# Called before every access: pointers, which of them are accessed, bytes of each, and "load",
# "store" or "atomic". Each returns which of them are to be made, or None for all. A pointer is an
# address, and above its bits the number of the storage that it came from (`Running.origins`); 0 for
# one that was a number meanwhile. Arithmetic on pointers leaves that number as it is.
WATCHERS: list[Callable[[Array, Array, int, str], Array | None]] = []
SUMS = interpreter_speed.SUMS
ADDRESS_BITS = compiler_hints.ADDRESS_BITS
ADDRESS = np.uint64(2**ADDRESS_BITS - 1)


class AccessError(AssertionError):
    """An access that a watcher refuses, and that has no mask to leave it out by."""


@dataclass(eq=False, frozen=True)
class Running:
    """A launch: ``fn`` is the kernel's function, ``kernel`` its name, ``arguments`` what it got.

    origins: the first byte of each storage that it got -> its number, from 1; while it is watched.
    """

    fn: Callable[..., Any]
    kernel: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    origins: dict[int, int] = field(default_factory=dict)


RUNNING: list[Running] = []

Handle, Builder = stock.TensorHandle, stock.InterpreterBuilder
_cast, _load, _store = Builder.cast_impl, Builder.create_masked_load, Builder.create_masked_store
_bitcast, _dot, _add_pointer = Builder.create_bitcast, Builder.create_dot, Builder.create_addptr
_read_modify_write, _compare_and_swap = Builder.create_atomic_rmw, Builder.create_atomic_cas
_binary = Builder.binary_op
_numpy_dtype, _convert_argument = stock._get_np_dtype, stock._implicit_cvt
_patch_tensor = stock._patch_lang_tensor


# -- bfloat16 ---------------------------------------------------------------------------------


def is_bf16(dtype: Any) -> bool:
    return bool(dtype.scalar.name == "bf16")  # asked of each value: names compare fastest


def to_bits(values: Array) -> Array:
    """float32 -> the bits of the nearest bfloat16, ties to even; NaN stays NaN. Same shape."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    chosen = np.where(np.isnan(values), quiet, rounded).astype(np.uint16)
    return chosen.reshape(np.shape(values))


def to_values(bits: Array) -> Array:
    """The bits of bfloat16 (uint16) -> float32. Same shape."""
    wide = np.ascontiguousarray(bits, np.uint16).astype(np.uint32) << np.uint32(16)
    return wide.view(np.float32).reshape(np.shape(bits))


class _Plain:
    """A handle's data under a dtype that the stock code takes as it is."""

    def __init__(self, data: Any, dtype: Any) -> None:
        self.data = data
        self.dtype = dtype

    def get_element_ty(self) -> Any:
        return self.dtype


def _as_bits(handle: Any) -> Any:
    if handle is None or not is_bf16(handle.dtype):
        return handle
    return _Plain(to_bits(handle.data), tl.uint16)


def _init_handle(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
    for count in interpreter_speed.COUNTS:
        count()
    if is_bf16(dtype):
        data = to_values(to_bits(np.asarray(data, np.float32)))
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr


_DTYPES: dict[str, Any] = {"bf16": np.dtype(np.float32)}


def _numpy_dtype_of(dtype: Any) -> Any:
    """The stock function makes a table of all types in each call. Types of one name are equal."""
    name = dtype.scalar.name
    if name not in _DTYPES:
        _DTYPES[name] = _numpy_dtype(dtype)
    return _DTYPES[name]


# -- operations -------------------------------------------------------------------------------

_COMPARISONS = {np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal}


def _binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
    if op in _COMPARISONS:
        return Handle(op(lhs.data, rhs.data), tl.int1)
    return _binary(self, lhs, rhs, op)


def _cast_impl(self: Any, source: Any, target: Any) -> Any:
    if is_bf16(target):
        return Handle(source.data.astype(np.float32), target.scalar)
    if is_bf16(source.dtype):
        source = _Plain(source.data, tl.float32)
    return _cast(self, source, target)


def _create_bitcast(self: Any, source: Any, target: Any) -> Any:
    if is_bf16(target):
        return Handle(to_values(source.data.view(np.uint16)), target.scalar)
    return _bitcast(self, _as_bits(source), target)


def _create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
    if not a.dtype.is_floating() or a.dtype.primitive_bitwidth == 8:
        return _dot(self, a, b, d, *rest)
    left, right = a.data, b.data
    in_tf32 = compiler_hints.TF32 and left.dtype == np.float32
    if in_tf32 and getattr(rest[0], "name", "") == "TF32":
        left, right = compiler_hints.in_tf32(left), compiler_hints.in_tf32(right)
    product = left.astype(np.float64) @ right.astype(np.float64)
    return Handle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)


def _set_attr(self: Any, name: str, values: Any) -> None:
    compiler_hints.verify(self.data, self.dtype.scalar, name, values)
    self.attr[name] = values


# -- pointers and accesses --------------------------------------------------------------------


def _create_addptr(self: Any, pointer: Any, offset: Any) -> Any:
    for see in SUMS:
        see(pointer.data, offset.data)
    return _add_pointer(self, pointer, offset)


def _pointer_to_int(self: Any, source: Any, target: Any) -> Any:
    return _bitcast(self, _Plain(source.data & ADDRESS, source.dtype), target)


def _watched(pointers: Any, mask: Any, kind: str) -> tuple[Any, Any]:
    """The addresses of an access, and its mask without what a watcher refuses."""
    size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    for watch in reversed(WATCHERS):  # what one refuses the others do not see
        allowed = watch(pointers.data, mask.data, size, kind)
        if allowed is not None:
            mask = Handle(np.reshape(allowed, np.shape(pointers.data)), tl.int1)
    if RUNNING and RUNNING[-1].origins:
        pointers = _Plain(pointers.data & ADDRESS, pointers.get_element_ty())
    return pointers, mask


# Loads of a descriptor give the last arguments by name.
def _masked_load(self: Any, ptrs: Any, mask: Any, other: Any, *rest: Any, **options: Any) -> Any:
    programs.loaded(np.size(ptrs.data))
    pointers, allowed = _watched(ptrs, mask, "load")
    if pointers.get_element_ty() != tl.bfloat16:
        result = _load(self, pointers, allowed, other, *rest, **options)
    else:
        of_bits = _Plain(pointers.data, tl.uint16)
        bits = _load(self, of_bits, allowed, _as_bits(other), *rest, **options)
        result = Handle(to_values(bits.data), tl.bfloat16)
    if other is None and compiler_hints.UNDEFINED and not np.all(mask.data):
        compiler_hints.left_out(result.data, mask.data, sum(self.grid_idx))
    return result


def _masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **options: Any) -> Any:
    pointers, mask = _watched(ptrs, mask, "store")
    write = functools.partial(_store, self, pointers, _as_bits(value), mask, *rest, **options)
    programs.stored(write, np.size(pointers.data))


def _added_in_bf16(addresses: Array, values: Array, mask: Array) -> Array:
    """Add float32 values to bfloat16 in memory, each sum rounded to bfloat16, one after the other
    where addresses are equal. What was there before, as float32; 0 where the mask is false."""
    before = np.zeros(addresses.shape, np.float32)
    left = np.flatnonzero(mask)
    while left.size:
        _, first = np.unique(addresses.flat[left], return_index=True)
        now, left = left[first], np.delete(left, first)
        at, everywhere = addresses.flat[now], np.ones(now.shape, bool)
        nothing = np.zeros(now.shape, np.uint16)
        stored = to_values(stock._interpreter.load(at, everywhere, nothing, nothing.dtype))
        stock._interpreter.store(at, to_bits(stored + values.flat[now]), everywhere)
        before.flat[now] = stored
    return before


def _atomic_rmw(self: Any, kind: Any, ptr: Any, value: Any, mask: Any, *rest: Any) -> Any:
    pointers, mask = _watched(ptr, mask, "atomic")
    if not is_bf16(value.dtype):
        result = _read_modify_write(self, kind, pointers, value, mask, *rest)
    elif kind.name == "FADD":
        before = _added_in_bf16(pointers.data, value.data, mask.data)
        result = Handle(before, tl.bfloat16)
    else:
        raise NotImplementedError(f"an atomic {kind.name} on bfloat16: of these there is only add")
    programs.atomic_done(np.size(result.data))
    return result


def _atomic_cas(self: Any, ptr: Any, compared: Any, value: Any, *rest: Any) -> Any:
    if is_bf16(compared.dtype):
        raise NotImplementedError("no compare-and-swap on bfloat16: use the bits, as int16")
    everywhere = Handle(np.ones_like(ptr.data, dtype=bool), tl.int1)
    pointers, allowed = _watched(ptr, everywhere, "atomic")
    if not allowed.data.all():
        raise AccessError("a compare-and-swap out of bounds")
    result = _compare_and_swap(self, pointers, compared, value, *rest)
    programs.atomic_done(np.size(result.data))
    return result


# -- arguments --------------------------------------------------------------------------------

_TENSORS = (torch.Tensor, torch.nn.Parameter)  # whose type on a GPU follows from their dtype
_POINTERS: dict[Any, Any] = {}


def _pointer(argument: Any) -> Any:
    """Triton finds the type by a string for each argument."""
    if type(argument) not in _TENSORS:
        return _convert_argument(argument)
    if argument.dtype not in _POINTERS:
        _POINTERS[argument.dtype] = _convert_argument(argument).type
    address = np.array([argument.data_ptr()], np.uint64)
    return interpreter_speed.value(address, _POINTERS[argument.dtype])


def _implicit_cvt(argument: Any) -> Any:
    if type(argument) is int and -(2**31) <= argument < 2**31:
        return interpreter_speed.value(np.array([argument], np.int32), tl.int32)
    if isinstance(argument, float):
        return interpreter_speed.value(np.array([argument], np.float32), tl.float32)
    if not hasattr(argument, "data_ptr"):
        return _convert_argument(argument)
    pointer = _pointer(argument)
    if (WATCHERS or SUMS) and RUNNING:
        origins = RUNNING[-1].origins
        start = getattr(argument, "base", argument).untyped_storage().data_ptr()
        number = origins.setdefault(start, len(origins) + 1)
        pointer.handle.data = pointer.handle.data | np.uint64(number << ADDRESS_BITS)
    return pointer


def _patch_lang_tensor(tensor: Any, *rest: Any) -> None:
    """numpy 2.5 takes no array of one element for a number."""
    _patch_tensor(tensor, *rest)
    tensor.__index__ = lambda self: int(np.asarray(self.handle.data).item())


# -- what takes the place of Triton's ---------------------------------------------------------

Handle.__init__, Handle.set_attr = _init_handle, _set_attr
for _name, _method in {
    "binary_op": _binary_op,
    "cast_impl": _cast_impl,
    "create_addptr": _create_addptr,
    "create_atomic_cas": _atomic_cas,
    "create_atomic_rmw": _atomic_rmw,
    "create_barrier": lambda self, *args: programs.barrier(),
    "create_bitcast": _create_bitcast,
    "create_dot": _create_dot,
    "create_extern_elementwise": libdevice.create_extern_elementwise,
    "create_masked_load": _masked_load,
    "create_masked_store": _masked_store,
    "create_ptr_to_int": _pointer_to_int,
    "get_bf16": lambda self, value: Handle(np.array([value], np.float32), tl.bfloat16),
}.items():
    setattr(Builder, _name, _method)
stock._get_np_dtype, stock._implicit_cvt = _numpy_dtype_of, _implicit_cvt
stock._patch_lang_tensor = _patch_lang_tensor
