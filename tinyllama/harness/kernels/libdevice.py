"""Libdevice's functions in Triton's interpreter, which passes over them and returns None.

The common ones are computed in float64 and rounded once; any other raises an error that names it.
"""

import contextlib
import functools
import importlib
import inspect
import math
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
from triton.language.core import is_builtin
from triton.runtime import interpreter as stock

Members = dict[str, Any]

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
def modules() -> list[tuple[Any, Members, Members]]:
    """The modules that hold libdevice's functions, whatever chip they are for; these functions by
    name; and what is called in their place."""
    folder = "triton.language.extra"
    functions = importlib.import_module(f"{folder}.cuda.libdevice")

    def interpreted(name: str) -> Callable[..., Any]:
        function = getattr(functions, name, None)

        def call(*args: Any, **_: Any) -> Any:
            if function is None:
                raise NotImplementedError(f"libdevice's {name} is not interpreted")
            return function(*args, **_MEANING)

        return call

    replaced = []
    for name in (f"{folder}.libdevice", f"{folder}.cuda.libdevice", f"{folder}.hip.libdevice"):
        with contextlib.suppress(ModuleNotFoundError):
            module = importlib.import_module(name)
            before = {
                member: value
                for member, value in vars(module).items()
                if inspect.isfunction(value) and value.__module__ == name
            }
            replaced.append((module, before, {name: interpreted(name) for name in before}))
    return replaced


@functools.cache
def _instead() -> dict[Any, Callable[..., Any]]:
    """What is called in place of each function of libdevice."""
    return {before[name]: calls[name] for _, before, calls in modules() for name in calls}


@functools.cache
def with_meaning(builtin: Callable[..., Any]) -> Callable[..., Any]:
    """A builtin of Triton's that can be called without a compiler."""
    return lambda *args, **named: builtin(*args, **{**named, **_MEANING})


def names_of(space: Members) -> Members:
    """What a module's own names for functions of libdevice, or for builtins of Triton's (``cast =
    tl.cast``), are to stand for while its kernels are interpreted."""
    functions = {name: value for name, value in space.items() if type(value) is FunctionType}
    return {
        name: _instead().get(function) or with_meaning(function)
        for name, function in functions.items()
        if function in _instead() or is_builtin(function)
    }
