"""Libdevice's functions in Triton's interpreter, which passes over them and returns None.

The common ones are computed in float64 and rounded once; any other raises an error that names it.
"""

import contextlib
import functools
import importlib
import inspect
import math
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import numpy as np
from triton.language.core import is_builtin
from triton.runtime import interpreter as stock

_UNLIKE_NUMPY = {
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "erf": np.vectorize(math.erf, otypes=[np.float64]),
    "pow": np.power,
    "fma": lambda a, b, c: a * b + c,
    "fdivide": np.divide,
}
# What builtins are given beside their arguments: triton 3.4 and later, or before.
_MEANING: dict[str, Any] = (
    {"_semantic": stock.interpreter_semantic}
    if hasattr(stock, "interpreter_semantic")
    else {"_builder": stock.interpreter_builder}
)
_AS_NUMPY = (
    "exp exp2 expm1 log log2 log10 log1p sqrt sin cos tan sinh cosh tanh fabs floor ceil trunc "
    "rint fmin fmax fmod"
)
_COMPUTED = {**_UNLIKE_NUMPY, **{name: getattr(np, name) for name in _AS_NUMPY.split()}}


def _function(symbol: str) -> Callable[..., Any]:
    """What a function of libdevice computes in float64, by its symbol: ``__nv_fast_expf``."""
    name = symbol.removeprefix("__nv_").removeprefix("fast_")
    for short in (name, name.removesuffix("f")):
        if short in _COMPUTED:
            return _COMPUTED[short]
    raise NotImplementedError(f"libdevice's {symbol} is not interpreted: check it on a GPU")


def create_extern_elementwise(
    builder: Any, library: str, path: str, symbol: str, args: Any, kind: Any, pure: bool
) -> Any:
    """A method of the interpreter's builder, which refuses external functions as it comes."""
    with np.errstate(all="ignore"):
        result = _function(symbol)(*(np.asarray(arg.data, np.float64) for arg in args))
    scalar = kind.scalar
    return stock.TensorHandle(result.astype(stock._get_np_dtype(scalar)), scalar)


@functools.cache
def _libdevice() -> tuple[dict[Any, Callable[..., Any]], list[tuple[Any, dict[str, Any]]]]:
    """Libdevice's functions, whatever chip they are for, with what is called in their place; and
    the modules that hold them, with their members then."""
    folder = "triton.language.extra"
    known = importlib.import_module(f"{folder}.cuda.libdevice")

    def interpreted(name: str) -> Callable[..., Any]:
        function = getattr(known, name, None)

        def call(*args: Any, **_: Any) -> Any:
            if function is None:
                raise NotImplementedError(f"libdevice's {name} is not interpreted")
            return function(*args, **_MEANING)

        return call

    instead: dict[Any, Callable[..., Any]] = {}
    modules = []
    for name in (f"{folder}.libdevice", f"{folder}.cuda.libdevice", f"{folder}.hip.libdevice"):
        with contextlib.suppress(ModuleNotFoundError):
            module = importlib.import_module(name)
            own = {
                member: interpreted(member)
                for member, value in vars(module).items()
                if inspect.isfunction(value) and value.__module__ == name
            }
            instead |= {vars(module)[member]: call for member, call in own.items()}
            modules.append((module, own))
    return instead, modules


@functools.cache
def with_meaning(builtin: Callable[..., Any]) -> Callable[..., Any]:
    """A builtin of Triton's that can be called without a compiler; of a class, as its method."""
    return lambda *args, **named: builtin(*args, **{**named, **_MEANING})


@contextlib.contextmanager
def computed() -> Iterator[Callable[[dict[str, Any]], None]]:
    """Libdevice's functions can be called meanwhile; and by the names that a kernel's module has
    for them, or for builtins of Triton's (``cast = tl.cast``), once what is yielded was called with
    the module's names."""
    instead, modules = _libdevice()
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def swap(space: dict[str, Any], members: dict[str, Any]) -> None:
        before.append((space, {name: space[name] for name in members}))
        space.update(members)

    def seen(space: dict[str, Any]) -> None:
        functions = [(name, one) for name, one in space.items() if type(one) is FunctionType]
        own = {
            name: instead[one] if one in instead else with_meaning(one)
            for name, one in functions
            if one in instead or is_builtin(one)
        }
        swap(space, own)

    try:
        for module, members in modules:
            swap(vars(module), members)
        yield seen
    finally:
        for space, members in reversed(before):
            space.update(members)
