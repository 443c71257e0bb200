"""Calls of providers with kernels are checked before a launch: kernels check no address.

What a check says depends only on what `signature` returns, so that it is made once for each.
"""

import functools
import operator
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


def _like(guards: Any, *tensors: torch.Tensor) -> Callable[..., bool]:
    """A check whether tensors have the classes, dtypes, devices and layouts of these. It keeps none
    of these tensors."""
    shapes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
    guard = guards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides)
    check: Callable[..., bool] = guard.check
    return check


def _torchs_guards() -> Any:
    """The class with which torch's compiler recognises tensors, in a fraction of a microsecond.
    None where it does not behave as expected: it is not part of torch's public interface."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        x = torch.empty(2, 2, device="cpu")
        unlike = (x.T, x[:1], x[None], x.double(), torch.empty(2, 2, device="meta"))
        recognised = [_like(TensorGuards, x)(tensor) for tensor in (x, *unlike)]
    except (ImportError, AttributeError, TypeError):
        return None
    return TensorGuards if recognised == [True] + [False] * len(unlike) else None


GUARDS = _torchs_guards()


class _EarlierCall:
    """A call with which others are compared: those that are `like` it have its signature."""

    def __init__(self, args: Sequence[torch.Tensor], params: Mapping[str, Any]) -> None:
        self._count, self._check = len(args), _like(GUARDS, *args)
        self._kind = autocast_kind(args[0])
        # The other state that a signature depends on.
        self._precision, self._deterministic = _PRECISION(), _DETERMINISTIC()
        self._autocast = torch.get_autocast_dtype(self._kind)
        self._names, self._values = list(params), list(params.values())

    def like(self, args: Sequence[Any], params: Mapping[str, Any]) -> bool:
        """Whether a call certainly has the same signature; False for some that have it."""
        return (
            len(args) == self._count
            and self._check(*args)
            and _PRECISION() == self._precision
            and _DETERMINISTIC() is self._deterministic
            and torch.get_autocast_dtype(self._kind) is self._autocast
            and (
                [*params] == self._names and all(map(operator.is_, params.values(), self._values))
                if params
                else not self._names
            )
        )


Value = TypeVar("Value")


class BySignature(Generic[Value]):
    """Values by the signatures of calls, ``most`` at a time. For a call that matches the last one,
    no signature is computed."""

    def __init__(self, most: int = MOST_ACCEPTED) -> None:
        self._most = most
        self._values: dict[tuple[Any, ...], tuple[_EarlierCall | None, Value]] = {}
        self._last: tuple[_EarlierCall | None, Value] | None = None

    def last(self, args: Sequence[Any], params: Mapping[str, Any]) -> Value | None:
        """The value of the last call, if this one certainly has its signature; its tensors are then
        of the same classes, and so are not a transform's."""
        last = self._last
        if last is not None and last[0] is not None and last[0].like(args, params):
            return last[1]
        return None

    def get(self, args: Sequence[Any], params: Mapping[str, Any]) -> Value | None:
        """The value of calls with this signature, if there is one."""
        value = self.last(args, params)
        return self.find(args, params) if value is None else value

    def find(self, args: Sequence[Any], params: Mapping[str, Any]) -> Value | None:
        """As `get`, where the call is not like the last one."""
        key = signature(args, params)
        if key is None or (entry := self._values.get(key)) is None:  # it is hashed once
            return None
        self._last = entry
        return entry[1]

    def put(self, args: Sequence[Any], params: Mapping[str, Any], value: Value) -> None:
        """Keep a value, unless the call has no signature."""
        key = signature(args, params)
        if key is None:
            return
        if len(self._values) >= self._most:
            self.clear()
        comparable = GUARDS is not None and args and all(type(x) in _PLAIN for x in args)
        call = _EarlierCall(args, params) if comparable else None
        self._values[key] = self._last = call, value

    def clear(self) -> None:
        """Forget all of them."""
        self._values.clear()
        self._last = None


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
