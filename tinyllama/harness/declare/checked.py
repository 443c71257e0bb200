"""Calls of providers with kernels are checked before a launch: kernels check no address."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

MOST_ACCEPTED = 4096  # calls of different shapes that a provider remembers


def checked(
    check: Callable[[Sequence[Any], Mapping[str, Any]], None], call: Callable[..., Any]
) -> Callable[..., Any]:
    """``call``, once ``check`` has raised no ValueError for its arguments.

    The result of the check depends only on the parameters and on the shapes, dtypes and devices of
    the tensors. It is cached: an eager call like an earlier one costs one look-up.
    """
    accepted: set[Any] = set()

    @functools.wraps(call)
    def with_check(*args: Any, **params: Any) -> Any:
        if torch.compiler.is_compiling():  # once, when the call is traced
            check(args, params)
            return call(*args, **params)
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        key = (len(args), *params.items(), *[(x.shape, x.dtype, x.device) for x in tensors])
        if key not in accepted:
            check(args, params)
            if len(accepted) >= MOST_ACCEPTED:
                accepted.clear()
            accepted.add(key)
        return call(*args, **params)

    # The compiler limits how often one code object is compiled: each provider has its own.
    own: Any = with_check
    own.__code__ = own.__code__.replace(co_name=call.__name__)
    return with_check


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
