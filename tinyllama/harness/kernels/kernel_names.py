"""What a kernel is called: in profiles, and in limits, records and messages."""

import re
from collections.abc import Callable
from types import FunctionType
from typing import Any


def shown_name(function: Callable[..., Any]) -> str:
    """What profilers are to call a kernel: its file, then what it does there, as one symbol."""
    op = _op_of(function.__module__)
    does = function.__name__.strip("_").removesuffix("_kernel")
    return re.sub(r"\W|^(?=\d)", "_", op if does == op else f"{op}_{does}")


SHOWN: dict[str, Callable[..., Any]] = {}
PRODUCTS = {"dot", "warpgroup_mma"}  # Triton's, and Gluon's


def multiplies(name: str) -> bool | None:
    """Whether the kernel that profilers show by this name has a matrix product, in itself or in a
    function that it calls; None for a kernel that is not ours."""
    return _has_product(SHOWN[name]) if name in SHOWN else None


def _has_product(function: Callable[..., Any]) -> bool:
    names = function.__code__.co_names
    called = (function.__globals__.get(name) for name in names)
    functions = (getattr(kernel, "fn", None) for kernel in called)
    inner = [function for function in functions if isinstance(function, FunctionType)]
    return not PRODUCTS.isdisjoint(names) or any(map(_has_product, inner))


def identity(kernel: Any) -> str:
    """The name of a kernel in limits, records and messages: ``op.function``."""
    return f"{_op_of(kernel.fn.__module__)}.{kernel.fn.__name__}"


# The module of a file that a user named, as `tinyllama.harness.declare.registry` imports it.
_LOADED = re.compile(r"^tinyllama_ops_file_(.+?)(_[0-9a-f]{8})?$")


def _op_of(module: str) -> str:
    """The op whose kernels a module holds: its file, or the folder of a file ``kernels.py`` or
    ``*_kernels.py``."""
    folder, _, file = _LOADED.sub(r"\1", module).rpartition(".")
    inside = folder and (file == "kernels" or file.endswith("_kernels"))
    return folder.rpartition(".")[2] if inside else file
