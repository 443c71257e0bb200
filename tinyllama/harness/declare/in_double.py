"""A reference that casts to float32, computed in float64 where it is the oracle."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from tinyllama.harness.machine.modes import DispatchMode

_NARROWER = (torch.float32, torch.bfloat16, torch.float16)
_FILLED = ("zeros", "ones", "full", "empty")  # tensors that are made without another one


class _DoubleKept(DispatchMode):
    """While active, what would be cast from float64 to a narrower float, or made beside it in one,
    is float64."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if named.get("dtype") in _NARROWER and (_double(args) or func._schema.name[6:] in _FILLED):
            named["dtype"] = torch.float64
        return func(*args, **named)


def _double(args: tuple[Any, ...]) -> bool:
    return any(isinstance(x, torch.Tensor) and x.dtype is torch.float64 for x in args)


def in_double(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, in which nothing is narrower than float64 for inputs in float64: for a
    reference with casts such as ``x.float()``, which would round the oracle to float32.

        @op.reference
        @in_double
        def eager(x): ...
    """

    @functools.wraps(function)
    def call(*args: Any, **params: Any) -> Any:
        with _DoubleKept() if _double(args) else contextlib.nullcontext():
            return function(*args, **params)

    return call
