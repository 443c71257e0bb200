"""Calls of providers with kernels are checked before a launch: kernels check no address.

What a check says depends only on what `signature` returns, so that it is made once for each.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch

from tinyllama.harness.kernels.precision import autocast_kind

MOST_ACCEPTED = 4096  # signatures of calls that a provider remembers
Check = Callable[[Sequence[Any], Mapping[str, Any]], None]
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# Without the Python functions of torch around them, where it has them.
_PRECISION = getattr(torch._C, "_get_float32_matmul_precision", torch.get_float32_matmul_precision)
_DETERMINISTIC = getattr(
    torch._C, "_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled
)
_BY_REPR = {bool, int, float, str, type(None), torch.dtype}  # `repr` tells all of them


def signature(args: Sequence[Any], params: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """All of a call but values and addresses: layouts, parameters, precision, determinism. None for
    what is neither a tensor nor None, for a tensor of a class of its own, which may hold its memory
    elsewhere, and where `repr` need not tell a parameter."""
    parts: list[Any] = [_PRECISION(), _DETERMINISTIC()]
    for x in args:
        if type(x) in _PLAIN:
            parts += (x.shape, x.stride(), x.dtype, x.device, x.requires_grad)
        elif x is None:
            parts.append(None)
        else:
            return None
    first = next((x for x in args if x is not None), None)
    if first is not None and torch.is_autocast_enabled(kind := autocast_kind(first)):
        parts.append(torch.get_autocast_dtype(kind))
    if params:  # 1, 1.0 and True are equal, and so are 0.0 and -0.0
        if not _BY_REPR.issuperset(map(type, params.values())):
            return None
        parts += (*params, *map(repr, params.values()))
    return tuple(parts)


Value = TypeVar("Value")


class BySignature(Generic[Value]):
    """Values by the signatures of calls, ``most`` at a time."""

    def __init__(self, most: int = MOST_ACCEPTED) -> None:
        self._most = most
        self._values: dict[tuple[Any, ...], Value] = {}

    def get(self, args: Sequence[Any], params: Mapping[str, Any]) -> Value | None:
        """The value of calls with this signature, if there is one."""
        key = signature(args, params)
        return None if key is None else self._values.get(key)

    def put(self, args: Sequence[Any], params: Mapping[str, Any], value: Value) -> None:
        """Keep a value, unless the call has no signature."""
        key = signature(args, params)
        if key is None:
            return
        if len(self._values) >= self._most:
            self.clear()
        self._values[key] = value

    def clear(self) -> None:
        """Forget all of them."""
        self._values.clear()


def checked(check: Check, call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, once ``check`` has raised no ValueError for its arguments. An eager call like an
    earlier one costs one look-up."""
    accepted: BySignature[bool] = BySignature()

    @functools.wraps(call)
    def with_check(*args: Any, **params: Any) -> Any:
        if torch.compiler.is_compiling():  # once, when the call is traced
            check(args, params)
        elif not accepted.get(args, params):
            check(args, params)
            accepted.put(args, params, True)
        return call(*args, **params)

    return named(with_check, call.__name__)


def named(function: Any, name: str) -> Any:
    """The function with a code object of its own: the compiler limits how often one is compiled,
    and each provider is to have its own."""
    function.__code__ = function.__code__.replace(co_name=name)
    return function
