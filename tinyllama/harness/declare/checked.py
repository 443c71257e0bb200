"""Calls of providers with kernels are checked before a launch: kernels check no address.

What a check says depends only on what `signature` returns, so that it is made once for each.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from tinyllama.harness.kernels.precision import autocast_kind

MOST_ACCEPTED = 4096  # signatures of calls that a provider remembers
Check = Callable[[Sequence[Any], Mapping[str, Any]], None]


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_TOLD = {bool, int, float, str, type(None), torch.dtype}  # by their `repr`


def signature(args: Sequence[Any], params: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """All of a call but values and addresses: the layouts of its tensors and whether they require
    gradients, its parameters, the precision that is asked for, and whether deterministic algorithms
    are. None where an argument is neither a tensor nor None, or a tensor of a class of its own,
    which may hold its memory elsewhere, and where `repr` need not tell all of a parameter."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    parts: list[Any] = [torch.get_float32_matmul_precision(), deterministic]
    first = None
    for x in args:
        if type(x) in _PLAIN:
            parts += (x.shape, x.stride(), x.dtype, x.device, x.requires_grad)
            first = x if first is None else first
        elif x is None:
            parts.append(None)
        else:
            return None
    if first is not None and torch.is_autocast_enabled(kind := autocast_kind(first)):
        parts.append(torch.get_autocast_dtype(kind))
    if params:  # 1, 1.0 and True are equal, and so are 0.0 and -0.0
        if not _TOLD.issuperset(map(type, params.values())):
            return None
        parts += (*params, *map(repr, params.values()))
    return tuple(parts)


def checked(check: Check, call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, once ``check`` has raised no ValueError for its arguments. An eager call like an
    earlier one costs one look-up."""
    accepted: set[Any] = set()

    @functools.wraps(call)
    def with_check(*args: Any, **params: Any) -> Any:
        if torch.compiler.is_compiling():  # once, when the call is traced
            check(args, params)
            return call(*args, **params)
        key = signature(args, params)
        if key is None or key not in accepted:
            check(args, params)
            if len(accepted) >= MOST_ACCEPTED:
                accepted.clear()
            accepted.add(key)
        return call(*args, **params)

    return named(with_check, call.__name__)


def named(function: Any, name: str) -> Any:
    """The function with a code object of its own: the compiler limits how often one is compiled,
    and each provider is to have its own."""
    function.__code__ = function.__code__.replace(co_name=name)
    return function


def on_one_device(op: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise ValueError for tensors (by name) of several devices. Scalars may stay on the host, as
    for torch's own operators."""
    sized = [(name, tensor.device) for name, tensor in tensors if tensor.dim()]
    for name, device in sized:
        if device != sized[0][1]:
            raise ValueError(
                f"{op}: {sized[0][0]} is on {sized[0][1]} and {name} on {device}: move them to one "
                "device"
            )


def of_dtypes(
    provider: str, tensors: Iterable[tuple[str, torch.Tensor]], dtypes: Sequence[torch.dtype]
) -> None:
    """Raise ValueError for a tensor of a dtype that the kernels of a provider do not know."""
    for name, tensor in tensors:
        if tensor.dtype not in dtypes:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise ValueError(
                f"{provider}: {name} has dtype {tensor.dtype}: use one of {known}, or the provider "
                "'eager'"
            )
