"""Values of Triton's interpreter, made honest: what `tinyllama.harness.kernels.interpreter` says of
bfloat16, comparisons, products, scalars and arguments; and what watches the accesses of a launch.
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
ADDRESS_BITS = 48
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


def _is_bf16(dtype: Any) -> bool:
    return bool(dtype.scalar.name == "bf16")  # asked of each value: names compare fastest


def _watched(ptrs: Any, mask: Any, kind: str) -> tuple[Any, Any]:
    """The addresses of an access, and its mask without what a watcher refuses."""
    size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
    for watch in reversed(WATCHERS):  # what one refuses the others do not see
        allowed = watch(ptrs.data, mask.data, size, kind)
        if allowed is not None:
            mask = stock.TensorHandle(np.reshape(allowed, np.shape(ptrs.data)), tl.int1)
    if RUNNING and RUNNING[-1].origins:
        ptrs = _Plain(ptrs.data & ADDRESS, ptrs.get_element_ty())
    return ptrs, mask


def _fix_comparisons() -> None:
    compares = {np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal}
    stock_op = stock.InterpreterBuilder.binary_op
    stock_idiv = stock.InterpreterBuilder.create_idiv

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if op in compares:
            result = stock.TensorHandle(op(lhs.data, rhs.data), tl.int1)
        else:
            result = stock_op(self, lhs, rhs, op)
        interpreter_speed.note(lhs, rhs, op, result)
        return result

    def create_idiv(self: Any, lhs: Any, rhs: Any) -> Any:
        result = stock_idiv(self, lhs, rhs)
        interpreter_speed.note(lhs, rhs, interpreter_speed.divided, result)
        return result

    stock.InterpreterBuilder.binary_op = binary_op
    stock.InterpreterBuilder.create_idiv = create_idiv


def _fix_values() -> None:
    handle, builder = stock.TensorHandle, stock.InterpreterBuilder
    cast, numpy_dtype = builder.cast_impl, stock._get_np_dtype
    load, store, bitcast, dot = (
        builder.create_masked_load,
        builder.create_masked_store,
        builder.create_bitcast,
        builder.create_dot,
    )

    def init(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
        for count in interpreter_speed.COUNTS:
            count()
        if _is_bf16(dtype):
            data = to_values(to_bits(np.asarray(data, np.float32)))
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if _is_bf16(dst_type):
            result = handle(src.data.astype(np.float32), dst_type.scalar)
        else:
            result = cast(self, _as_float32(src), dst_type)
        interpreter_speed.note(src, dst_type, interpreter_speed.CAST, result)
        return result

    # Loads of a descriptor give the last arguments by name.
    def masked_load(self: Any, ptrs: Any, mask: Any, other: Any, *rest: Any, **named: Any) -> Any:
        programs.loaded(np.size(ptrs.data))
        seen, allowed = _watched(ptrs, mask, "load")
        if seen.get_element_ty() != tl.bfloat16:
            result = load(self, seen, allowed, other, *rest, **named)
        else:
            plain = _Plain(seen.data, tl.uint16)
            bits = load(self, plain, allowed, _as_bits(other), *rest, **named)
            result = handle(to_values(bits.data), tl.bfloat16)
        if other is None and compiler_hints.UNDEFINED and not np.all(mask.data):
            compiler_hints.left_out(result.data, mask.data)
        return result

    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        ptrs, mask = _watched(ptrs, mask, "store")
        stored = functools.partial(store, self, ptrs, _as_bits(value), mask, *rest, **named)
        programs.stored(stored, np.size(ptrs.data))

    addptr = builder.create_addptr

    def create_addptr(self: Any, ptr: Any, offset: Any) -> Any:
        for note in SUMS:
            note(ptr.data, offset.data)
        result = addptr(self, ptr, offset)
        interpreter_speed.note(ptr, offset, interpreter_speed.ADD_POINTER, result)
        return result

    def ptr_to_int(self: Any, src: Any, dst_type: Any) -> Any:
        return bitcast(self, _Plain(src.data & ADDRESS, src.dtype), dst_type)

    def create_bitcast(self: Any, src: Any, dst_type: Any) -> Any:
        if _is_bf16(dst_type):
            return handle(to_values(src.data.view(np.uint16)), dst_type.scalar)
        return bitcast(self, _as_bits(src), dst_type)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        if not a.dtype.is_floating() or a.dtype.primitive_bitwidth == 8:
            return dot(self, a, b, d, *rest)
        factors = a.data, b.data
        if (
            compiler_hints.TF32
            and a.data.dtype == np.float32
            and getattr(rest[0], "name", "") == "TF32"
        ):
            factors = compiler_hints.in_tf32(a.data), compiler_hints.in_tf32(b.data)
        product = factors[0].astype(np.float64) @ factors[1].astype(np.float64)
        return handle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    def set_attr(self: Any, name: str, values: Any) -> None:
        compiler_hints.verify(self.data, self.dtype.scalar, name, values)
        self.attr[name] = values

    rmw, cas = builder.create_atomic_rmw, builder.create_atomic_cas

    def refuse_bf16(*handles: Any) -> None:
        if any(_is_bf16(one.dtype) for one in handles):
            raise NotImplementedError("no atomics on bfloat16: accumulate in float32")

    def atomic_rmw(self: Any, kind: Any, ptr: Any, value: Any, mask: Any, *rest: Any) -> Any:
        refuse_bf16(value)
        ptr, mask = _watched(ptr, mask, "atomic")
        result = rmw(self, kind, ptr, value, mask, *rest)
        programs.atomic_done(np.size(result.data))
        return result

    def atomic_cas(self: Any, ptr: Any, compared: Any, value: Any, *rest: Any) -> Any:
        refuse_bf16(compared, value)
        every = handle(np.ones_like(ptr.data, dtype=bool), tl.int1)
        ptr, allowed = _watched(ptr, every, "atomic")
        if not allowed.data.all():
            raise AccessError("a compare-and-swap out of bounds")
        result = cas(self, ptr, compared, value, *rest)
        programs.atomic_done(np.size(result.data))
        return result

    builder.create_atomic_rmw = atomic_rmw
    builder.create_atomic_cas = atomic_cas
    handle.__init__ = init
    handle.set_attr = set_attr
    builder.cast_impl = cast_impl
    builder.create_masked_load = masked_load
    builder.create_masked_store = masked_store
    builder.create_barrier = lambda self, *args: programs.barrier()
    builder.create_bitcast = create_bitcast
    builder.create_ptr_to_int = ptr_to_int
    builder.create_addptr = create_addptr
    builder.create_dot = create_dot
    builder.create_extern_elementwise = libdevice.create_extern_elementwise
    builder.get_bf16 = lambda self, value: handle(np.array([value], np.float32), tl.bfloat16)
    stock._get_np_dtype = _remembered(
        lambda dtype: np.dtype(np.float32) if _is_bf16(dtype) else numpy_dtype(dtype)
    )


class _Plain:
    """A handle's data under a dtype that the stock code takes as it is."""

    def __init__(self, data: Any, dtype: Any) -> None:
        self.data = data
        self.dtype = dtype

    def get_element_ty(self) -> Any:
        return self.dtype


def _as_bits(handle: Any) -> Any:
    if handle is None or not _is_bf16(handle.dtype):
        return handle
    return _Plain(to_bits(handle.data), tl.uint16)


def _as_float32(handle: Any) -> Any:
    return _Plain(handle.data, tl.float32) if _is_bf16(handle.dtype) else handle


def _remembered(numpy_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The stock function makes a table of all types in each call. Types of one name are equal."""
    known: dict[str, Any] = {}

    def found(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = numpy_dtype(dtype)
        return known[name]

    return found


def _fix_scalars() -> None:
    """numpy 2.5 takes no array of one element for a number."""
    patch = stock._patch_lang_tensor

    def patched(tensor: Any, *rest: Any) -> None:
        patch(tensor, *rest)
        tensor.__index__ = lambda self: int(np.asarray(self.handle.data).item())

    stock._patch_lang_tensor = patched


_TENSORS = (torch.Tensor, torch.nn.Parameter)  # whose type on a GPU follows from their dtype


def _fix_arguments() -> None:
    convert = stock._implicit_cvt
    pointers: dict[Any, Any] = {}

    def pointer(argument: Any) -> Any:
        """Triton finds the type by a string for each argument."""
        shared = pointers.get(argument.dtype) if type(argument) in _TENSORS else None
        if shared is None:
            made = interpreter_speed.pointer(convert(argument))
            if type(argument) in _TENSORS:
                pointers[argument.dtype] = made.type
            return made
        return interpreter_speed.value(np.array([argument.data_ptr()], np.uint64), shared, shared)

    def converted(argument: Any) -> Any:
        if type(argument) is int and -(2**31) <= argument < 2**31:
            return interpreter_speed.value(np.array([argument], np.int32), tl.int32, tl.int32)
        if isinstance(argument, float):
            return interpreter_speed.value(np.array([argument], np.float32), tl.float32, tl.float32)
        if not hasattr(argument, "data_ptr"):
            return convert(argument)
        made = pointer(argument)
        if (WATCHERS or SUMS) and RUNNING:
            origins = RUNNING[-1].origins
            start = getattr(argument, "base", argument).untyped_storage().data_ptr()
            number = origins.setdefault(start, len(origins) + 1)
            made.handle.data = made.handle.data | np.uint64(number << ADDRESS_BITS)
        return made

    stock._implicit_cvt = converted


def _fix_scans() -> None:
    """A device adds up pairs, then pairs of these; numpy one element after the other, which loses
    more digits the longer the row is."""
    cumsum = stock.ScanOps.cumsum

    def scanned(self: Any, input: Any) -> list[Any]:
        values = np.asarray(input.handle.data)
        if values.dtype == np.bool_ or not values.ndim:
            return list(cumsum(self, input))
        rows = np.moveaxis(np.array(values), self.axis or 0, -1)
        step = 1
        while step < rows.shape[-1]:
            rows[..., step:] = rows[..., step:] + rows[..., :-step]
            step *= 2
        return [self.to_tensor(np.moveaxis(rows, -1, self.axis or 0), dtype=input.dtype)]

    stock.ScanOps.cumsum = scanned


def _fix_combinations() -> None:
    """A device combines parts of a row that are combined already; the stock interpreter goes one
    element after the other, where a function that is not associative is right, too. Where one does
    not take blocks, it decides."""
    one_by_one = stock.ScanOps.generic_scan, stock.ReduceOps.generic_reduce

    def combined(self: Any, left: list[Array], right: list[Array], like: Any) -> list[Array]:
        pairs = zip((*left, *right), (*like, *like), strict=True)
        found = self.combine_fn.fn(*(self.to_tensor(data, one.dtype) for data, one in pairs))
        found = found if isinstance(found, tuple) else (found,)
        for one, given in zip(found, like, strict=True):
            if one.dtype != given.dtype or one.handle.data.shape != left[0].shape:
                raise TypeError("other types or shapes than those of the elements")
        return [one.handle.data for one in found]

    def scanned(self: Any, input: Any) -> Any:
        rows, step = [one.handle.data for one in input], 1
        size = rows[0].shape[self.axis]
        place = np.arange(size).reshape([-1 if n == self.axis else 1 for n in range(rows[0].ndim)])
        try:
            while step < size:
                before = [np.roll(one, step, self.axis) for one in rows]
                new = combined(self, before, rows, input)
                rows = [np.where(place < step, *one) for one in zip(rows, new, strict=True)]
                step *= 2
        except Exception:
            return one_by_one[0](self, input)
        return [self.to_tensor(data, one.dtype) for data, one in zip(rows, input, strict=True)]

    def reduced(self: Any, input: Any) -> Any:
        axis, rows = self.axis or 0, [one.handle.data for one in input]
        rows = [x.reshape(-1) if self.axis is None else np.moveaxis(x, axis, 0) for x in rows]
        try:
            while len(rows[0]) > 1:
                rows = combined(self, [x[::2] for x in rows], [x[1::2] for x in rows], input)
        except Exception:
            return one_by_one[1](self, input)
        if self.axis is None:
            kept = (1,) * input[0].handle.data.ndim
            rows = [one.reshape(kept) if self.keep_dims else one[0].item() for one in rows]
        else:
            rows = [np.moveaxis(x, 0, axis) if self.keep_dims else x[0] for x in rows]
        return [self.to_tensor(data, one.dtype) for data, one in zip(rows, input, strict=True)]

    stock.ScanOps.generic_scan, stock.ReduceOps.generic_reduce = scanned, reduced


def _fix_extremes() -> None:
    """A maximum ignores NaN, as on a device; that of nothing but NaN is a NaN, and its place the
    first. In Triton 3.6 the interpreter's is a NaN wherever there is one; later, numpy warns of NaN
    alone, or raises an error."""
    min_max = stock.ReduceOps.min_max

    def place(of: Callable[..., Array], lowest: float) -> Callable[..., Array]:
        def found(data: Array, **axis: Any) -> Array:
            return of(
                np.where(np.isnan(data), lowest, data) if data.dtype.kind == "f" else data, **axis
            )

        return found

    known: dict[Any, Any] = {
        **dict.fromkeys((np.max, np.nanmax), np.fmax.reduce),
        **dict.fromkeys((np.min, np.nanmin), np.fmin.reduce),
        **dict.fromkeys((np.argmax, np.nanargmax), place(np.argmax, -np.inf)),
        **dict.fromkeys((np.argmin, np.nanargmin), place(np.argmin, np.inf)),
    }

    def quiet(self: Any, input: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        value, index = (known.get(each, each) for each in (val_reduce_op, idx_reduce_op))
        return min_max(self, input, value, index)

    stock.ReduceOps.min_max = quiet


_fix_comparisons()
_fix_arguments()
_fix_scans()
_fix_combinations()
_fix_extremes()
_fix_values()
_fix_scalars()
