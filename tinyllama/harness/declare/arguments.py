"""Inputs that an implementation takes together, as a NamedTuple.

An op of many inputs writes their names once, and its parameters' defaults in the declaration:

    class Inputs(NamedTuple):
        x: torch.Tensor
        weight: torch.Tensor

    @op.provider("torch")
    def stock(given: Inputs, eps: float) -> torch.Tensor: ...

Callers still pass one argument for each input, and parameters by name.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any


def spread(
    function: Callable[..., Any], defaults: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """``function`` with one argument for each field of the NamedTuple that its first argument is
    annotated with; ``function`` itself where that is another type.

    defaults: values of parameters that a call leaves out.
    """
    taken = list(_signature(function).parameters.values())
    inputs: Any = taken[0].annotation if taken else None
    if not (isinstance(inputs, type) and issubclass(inputs, tuple) and hasattr(inputs, "_fields")):
        return function
    defaults = dict(defaults or {})

    @functools.wraps(function)
    def call(*args: Any, **params: Any) -> Any:
        return function(inputs(*args), **{**defaults, **params})

    parameters = [
        *(Parameter(name, Parameter.POSITIONAL_ONLY) for name in inputs._fields),
        *(parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in taken[1:]),
    ]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """With annotations as objects, or as they are written where one of them is no expression."""
    try:
        return inspect.signature(function, eval_str=True)
    except (AttributeError, NameError, SyntaxError, TypeError):
        return inspect.signature(function)
