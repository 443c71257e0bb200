"""The language while kernels are interpreted, and as it was afterwards.

Triton's interpreter replaces the builtins of ``triton.language`` before each launch and before the
first call of a module's functions, for the modules that the kernel's module sees. Here it does so
once, for all modules; a launch puts there what it found. All is put back after a launch, since the
same process also compiles.
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import triton.compiler.code_generator  # noqa: F401 (a table in it has functions as keys)
import triton.language as tl
from triton.runtime import interpreter as stock

from tinyllama.harness.kernels import libdevice
from tinyllama.harness.kernels.interpreter_speed import replacement
from tinyllama.harness.kernels.libdevice import Members

_MISSING = object()
_LATER = ("condition", "tensor_descriptor_base")  # which triton 3.3 may lack
_OWNERS = [tl, tl.core, tl.math, tl.tensor, tl.dtype]
_OWNERS += [getattr(tl.core, name) for name in _LATER if hasattr(tl.core, name)]


class Index(int):
    """A loop variable of an interpreted kernel, or what is computed from it: a number that can be
    cast, since a compiled kernel has a tensor there."""

    dtype = tl.int32

    def to(self, dtype: Any, *rest: Any, **named: Any) -> Any:
        return tl.cast(int(self), dtype, *rest, **named)


def _of_indices(of_int: Callable[[int, Any], Any]) -> Callable[[Index, Any], Any]:
    def computed(self: Index, right: Any) -> Any:
        result = of_int(self, right)
        return result if result is NotImplemented else Index(result)

    return computed


for _name in ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift"):
    for _method in (f"__{_name}__", f"__r{_name}__"):
        setattr(Index, _method, _of_indices(getattr(int, _method)))


def counted(numbers: Callable[..., Iterable[int]], *args: Any, **named: Any) -> Iterator[Any]:
    """The variable of a loop, of 64 bits where a bound is: compiled, it has their widest type."""
    types = (bound.dtype for bound in (*args, *named.values()) if isinstance(bound, tl.tensor))
    wide = next((dtype for dtype in types if dtype.primitive_bitwidth > 32), None)
    indices = map(Index, numbers(*args, **named))
    return (index.to(wide) for index in indices) if wide else indices


_CHANGES: list[tuple[Any, Members, Members]] = []  # owner, its members before, and meanwhile
_INSIDE: list[None] = []
_patch_lang: Any = stock._patch_lang


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Meanwhile the language is the interpreter's. Inside of another one nothing is changed."""
    if not _INSIDE:
        if not _CHANGES or not all(_has(owner, before) for owner, before, _ in _CHANGES):
            _CHANGES[:] = _changes()
        for owner, _, meanwhile in _CHANGES:
            _put(owner, meanwhile)
        # Under TRITON_INTERPRET a call of tl.max changes the whole language again: 2 ms each.
        stock._patch_lang = lambda fn: _Unchanged
    _INSIDE.append(None)
    try:
        yield
    finally:
        _INSIDE.pop()
        if not _INSIDE:
            stock._patch_lang = _patch_lang
            for owner, before, _ in _CHANGES:
                _put(owner, before)


class _Unchanged:
    """What Triton gets for a change of the language that was made before."""

    @staticmethod
    def restore() -> None:
        """Undo nothing."""


def _changes() -> list[tuple[Any, Members, Members]]:
    """What Triton changes, made fast; and libdevice's functions."""
    was = [dict(vars(owner)) for owner in _OWNERS]
    _patch_lang(FunctionType(_put.__code__, {"tl": tl, "core": tl.core}))  # which sees both
    changes = []
    for owner, members in zip(_OWNERS, was, strict=True):
        before, meanwhile = {}, {}
        for name, member in vars(owner).items():
            if members.get(name, _MISSING) is not member:
                before[name] = members.get(name, _MISSING)
                meanwhile[name] = replacement(owner, name, member)
        if "range" in meanwhile:
            meanwhile["range"] = functools.partial(counted, meanwhile["range"])
        changes.append((owner, before, meanwhile))
    for owner, before, _ in changes:
        _put(owner, before)
    return [*changes, *libdevice.modules()]


def _has(owner: Any, members: Members) -> bool:
    now = (vars(owner).get(name, _MISSING) for name in members)
    return all(map(operator.is_, now, members.values()))


def _put(owner: Any, members: Members) -> None:
    if isinstance(owner, ModuleType):
        vars(owner).update(members)  # faster than one at a time
    for name, member in members.items():
        if member is _MISSING:
            delattr(owner, name)
        elif not isinstance(owner, ModuleType):
            setattr(owner, name, member)
