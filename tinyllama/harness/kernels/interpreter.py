"""Triton's interpreter made honest: bfloat16 as values, and kernels that also compile.

The interpreter runs a kernel's programs one after the other in numpy, on the CPU. Nine things
in it are fixed here, once, so that no kernel branches on it and no tolerance widens for it:

* it holds bfloat16 as bit patterns, on which sums and products work as on integers, and stores
  float32 as bfloat16 by truncation; here a bfloat16 is a float32 rounded to nearest, ties to even;
* it needs ``TRITON_INTERPRET`` before triton is imported, and then nothing compiles; here a
  kernel is interpreted when its tensors are on the CPU, in the same process that compiles it;
* numpy's BLAS adds up a product in an order that depends on where an element stands, so that a
  score made again as k q differs from q k; here the sum inside a product is one in float64, rounded
  once, wherever it stands;
* it gives the result of a comparison the type of what was compared, so that a mask made of a block
  and a scalar, or of bfloat16, is refused; here it has the type int1, as in a compiled kernel;
* it leaves a floating-point argument a Python number; here it is a float32 scalar, as compiled;
* it passes over libdevice, whose functions return None; here the common ones are computed, and the
  others raise an error that names them;
* it does not verify what a kernel promises its compiler; here a false promise raises an error
  (`tinyllama.harness.kernels.promises`);
* numpy warns of an overflow, even in elements that a mask leaves out; here, as on a
  GPU, the result is infinite without a warning;
* up to triton 3.3 it leaves the language patched behind it; here all is put back.

What it cannot show stays so: products are never tf32 and add up without loss. Programs run in turn,
or as `tinyllama.harness.kernels.programs` orders. A store out of bounds may end the process, unless
accesses are watched (`tinyllama.harness.kernels.bounds`); an endless loop is ended in `limited`.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as stock
from triton.runtime.jit import JITFunction

from tinyllama.harness.kernels import (
    libdevice,
    operators,
    patches,
    programs,
    promises,
    shared_types,
)
from tinyllama.harness.kernels.known import among

Array = Any  # a numpy array

# Called before every access: pointers, which of them are accessed, bytes of each, and "load",
# "store" or "atomic". Each returns which of them are to be made, or None for all. A pointer is an
# address, and above its bits the number of the storage that it came from (`Running.origins`); 0 for
# one that was a number meanwhile. Arithmetic on pointers leaves that number as it is.
WATCHERS: list[Callable[[Array, Array, int, str], Array | None]] = []
SUMS = operators.SUMS
ADDRESS_BITS = 48
ADDRESS = np.uint64(2**ADDRESS_BITS - 1)
STEPS = 500_000  # operations of one program, of some microseconds each, after which it is ended


class EndlessLoopError(AssertionError):
    """A program that takes more operations than `limited` allows."""


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


_RUNNING: list[Running] = []


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


class _InPlace(stock.GridExecutor):
    """Works on the tensors themselves: the stock one gives each memory back by copying it to where
    it is already."""

    def _init_args_hst(self, args_dev: Any, kwargs: Any) -> tuple[Any, Any]:
        return args_dev, kwargs

    def _restore_args_dev(self, *_: Any) -> None:
        pass


def run(
    function: Callable[..., Any],
    names: list[str],
    grid: tuple[int, ...],
    args: Any,
    kwargs: Any,
    kernel: str = "",
) -> None:
    """Run a kernel's Python function for every program of a grid, on tensors of the CPU.

    names: of its arguments; kernel: its own, ``op.function``.
    """
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    with (
        among(_RUNNING, Running(function, kernel, named)),
        patches.put_back(),
        libdevice.computed() as seen,
        _device_functions(function, seen),
        np.errstate(all="ignore"),
    ):
        programs.fitting(grid, kernel)
        programs.launched(kernel, function)
        called = programs.scheduled(_rewritten(function), kernel, stock.interpreter_builder)
        _InPlace(called, names, grid)(*args, **kwargs)


def running() -> tuple[Running, tuple[int, ...]]:
    """The launch that is interpreted, an object of its own for each, and its current program."""
    return _RUNNING[-1], tuple(stock.interpreter_builder.grid_idx)


class _Steps:
    """Counts the operations of the program that runs."""

    limit = STEPS
    taken = 0
    program: Any = None

    def take(self) -> None:
        program = getattr(stock.interpreter_builder, "grid_idx", ())  # none before the first launch
        if program is not self.program:
            self.program, self.taken = program, 0
        self.taken += 1
        if self.taken > self.limit:
            self.taken = 0
            kernel = _RUNNING[-1].kernel if _RUNNING else "a kernel"
            raise EndlessLoopError(
                f"{kernel}, program {tuple(program)}: more than {self.limit:,} operations: "
                "an endless loop?"
            )


_STEPS = _Steps()


@contextlib.contextmanager
def limited(steps: int = STEPS) -> Iterator[None]:
    """Meanwhile, a program that takes more operations raises EndlessLoopError."""
    before, _STEPS.limit = _STEPS.limit, steps
    counts, operators.COUNTS[:] = [*operators.COUNTS], [_STEPS.take]
    try:
        yield
    finally:
        _STEPS.limit, operators.COUNTS[:] = before, counts


_REWRITTEN: dict[Callable[..., Any], Callable[..., Any]] = {}


def _rewritten(function: Callable[..., Any]) -> Callable[..., Any]:
    if function not in _REWRITTEN:
        _REWRITTEN[function] = stock.InterpretedFunction(function).rewrite()
    return _REWRITTEN[function]


@contextlib.contextmanager
def _device_functions(
    kernel: Callable[..., Any], seen: Callable[[dict[str, Any]], None]
) -> Iterator[None]:
    """Functions under ``jit``, those of triton's own library too, can be called meanwhile.

    seen: prepares the names that functions of a module see (`libdevice.computed`).
    """
    before = JITFunction.__call__
    known, counting = set[int](), list[dict[str, Any]]()

    def prepare(names: dict[str, Any]) -> None:
        known.add(id(names))
        seen(names)
        if "range" not in names:
            names["range"] = functools.partial(patches.counted, range)
            counting.append(names)

    prepare(kernel.__globals__)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        names = self.fn.__globals__
        if id(names) not in known:
            prepare(names)
            if tl.core in names.values():  # as in triton's own library
                stock._patch_lang(self.fn)
        return _rewritten(self.fn)(*args, **kwargs)

    JITFunction.__call__ = call
    try:
        yield
    finally:
        JITFunction.__call__ = before
        for names in counting:
            del names["range"]


@functools.cache
def _builtins(owner: Any) -> list[str]:
    """The names of what triton's interpreter has to patch in a module or class of the language."""
    return [name for name, member in inspect.getmembers(owner) if tl.core.is_builtin(member)]


def _patch_builtin(owner: Any, builder: Any, *scope: Any) -> None:
    """The stock function looks at each member of each module, in each launch, several times."""
    change = scope[0].set_attr if scope else setattr  # from triton 3.6 on there is a scope
    for name in _builtins(owner):
        member = getattr(owner, name)
        if tl.core.is_builtin(member):  # else it is patched
            change(owner, name, _interpreted(owner, name, member))


@functools.cache
def _interpreted(owner: Any, name: str, builtin: Callable[..., Any]) -> Callable[..., Any]:
    return operators.replacement(owner, name, libdevice.with_meaning(builtin))


# -- bfloat16 ---------------------------------------------------------------------------------


def _is_bf16(dtype: Any) -> bool:
    return bool(dtype.scalar.name == "bf16")  # asked of each value: names compare fastest


def _watched(ptrs: Any, mask: Any, kind: str) -> tuple[Any, Any]:
    """The addresses of an access, and its mask without what a watcher refuses."""
    size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
    for watch in reversed(WATCHERS):  # what one refuses the others do not see
        allowed = watch(ptrs.data, mask.data, size, kind)
        if allowed is not None:
            mask = stock.TensorHandle(np.reshape(allowed, np.shape(ptrs.data)), tl.int1)
    if _RUNNING and _RUNNING[-1].origins:
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
        operators.note(lhs, rhs, op, result)
        return result

    def create_idiv(self: Any, lhs: Any, rhs: Any) -> Any:
        result = stock_idiv(self, lhs, rhs)
        operators.note(lhs, rhs, operators.divided, result)
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
        for count in operators.COUNTS:
            count()
        if _is_bf16(dtype):
            data = to_values(to_bits(np.asarray(data, np.float32)))
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if _is_bf16(dst_type):
            result = handle(src.data.astype(np.float32), dst_type.scalar)
        else:
            result = cast(self, _as_float32(src), dst_type)
        operators.note(src, dst_type, operators.CAST, result)
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
        if other is None and promises.UNDEFINED and not np.all(mask.data):
            promises.left_out(result.data, mask.data)
        operators.note(ptrs, (mask, other, rest, named), operators.LOAD, result)
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
        operators.note(ptr, offset, operators.ADD_POINTER, result)
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
        if promises.TF32 and a.data.dtype == np.float32 and getattr(rest[0], "name", "") == "TF32":
            factors = promises.in_tf32(a.data), promises.in_tf32(b.data)
        product = factors[0].astype(np.float64) @ factors[1].astype(np.float64)
        return handle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    def set_attr(self: Any, name: str, values: Any) -> None:
        promises.held(self.data, self.dtype.scalar, name, values)
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
            made = shared_types.pointer(convert(argument))
            if type(argument) in _TENSORS:
                pointers[argument.dtype] = made.type
            return made
        return operators.value(np.array([argument.data_ptr()], np.uint64), shared, shared)

    def converted(argument: Any) -> Any:
        if type(argument) is int and -(2**31) <= argument < 2**31:
            return operators.value(np.array([argument], np.int32), tl.int32, tl.int32)
        if isinstance(argument, float):
            return operators.value(np.array([argument], np.float32), tl.float32, tl.float32)
        if not hasattr(argument, "data_ptr"):
            return convert(argument)
        made = pointer(argument)
        if (WATCHERS or SUMS) and _RUNNING:
            origins = _RUNNING[-1].origins
            start = getattr(argument, "base", argument).untyped_storage().data_ptr()
            number = origins.setdefault(start, len(origins) + 1)
            made.handle.data = made.handle.data | np.uint64(number << ADDRESS_BITS)
        return made

    stock._implicit_cvt = converted


_fix_comparisons()
_fix_arguments()
_fix_values()
_fix_scalars()
stock._patch_builtin = _patch_builtin
stock._patch_lang = functools.partial(patches.patched, patch=stock._patch_lang)
shared_types.share()
patches.signatures_once()
# What a check of overflows computes is read where asserts are on (``debug``), and it is a sixth of
# the time.
stock.interpreter_builder.options = replace(
    stock.interpreter_builder.options, sanitize_overflow=False
)
