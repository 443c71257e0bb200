"""How a declaration that contradicts itself is refused."""

import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from tinyllama.harness.declare.provider import MOST_SLACK
from tinyllama.harness.declare.specs import (
    STANDARD,
    TIMED_LAYOUTS,
    DeclarationError,
    Tensor,
    names_in,
    size_of,
    sizes_in,
)

Declared = Any  # an `Op`, whose file imports this one

NAME = re.compile(r"[a-z][a-z0-9_]*\Z")  # of an op or a provider
_SUFFIX = re.compile(r"_[A-Z][A-Za-z0-9]*\Z")  # of an argument: its shape
_KNOWN_DIMENSIONS = (
    "use those of the inputs, numbers, and sums, products and quotients of these ('N 2', 'N D/2'); "
    "for a parameter k, Tensor('N 2', shape_by=lambda params: f'N {params[\"k\"]}')"
)


def require(condition: bool, op: str, message: str) -> None:
    if not condition:
        raise DeclarationError(f"op {op!r}: {message}")


def check_declaration(op: Declared) -> None:
    """Raise DeclarationError for a declaration that contradicts itself."""
    name, leads = op.name, len(op.leading)
    require(bool(NAME.match(name)), name, "name an op in lower_case")
    require(bool(op.cases), name, "declare at least one case")
    text = "declare outputs, or inputs with mutated=True, and not both"
    require(bool(op.outputs) != bool(op.mutated), name, text)
    require(not set(op.inputs) & set(op.params), name, "an input and a parameter share a name")
    for place, (of, tensor) in enumerate(op.inputs.items()):
        if wrong := _wrong_input(tensor, first=not place):
            raise DeclarationError(f"op {name!r}: input {of!r} {wrong}")
    for of, tensor in {**op.inputs, **op.outputs}.items():
        require(tensor.dtype_of is None, name, f"{of!r}: dtype_of is for what is saved")
        integral = not tensor.floating and of in op.outputs
        require(integral or not tensor.off_by, name, f"{of!r}: off_by is for integral outputs")
    first = next(iter(op.inputs.values()))
    text = f"leading {op.leading}: they are not the first of its first input"
    require(first.axes[:leads] == op.leading, name, text)
    _check_dimensions(op)
    _check_cases(op)
    for layout, bar in op.layouts.items():
        right = layout in TIMED_LAYOUTS and isinstance(bar, (int, float)) and 1 < bar < math.inf
        text = f"layouts of {layout!r}: {bar!r}: give {' or '.join(TIMED_LAYOUTS)} a number above 1"
        require(right, name, text)


def _wrong_input(tensor: Tensor, first: bool) -> str:
    """What is wrong with an input by itself, in words; else "". first: it is the op's first."""
    if tensor.grad and (tensor.mutated or not tensor.floating):
        return "is integral or mutated, it has no grad"
    if tensor.values is STANDARD and not tensor.floating:
        kinds = "integers(high) of tinyllama.harness.values (2 for booleans)"
        return f"is {tensor.dtype}: give it values=, such as {kinds}"
    if tensor.optional and (first or tensor.mutated or tensor.many):
        return "is optional: neither the first input nor one that is mutated or a list may be"
    if tensor.many and not all(axis.isidentifier() for axis in tensor.axes):
        return f"is a list of tensors ({tensor.shape}): each axis is a dimension's name"
    return ""


def _check_dimensions(op: Declared) -> None:
    """Each dimension of an output, and of a computed axis, is told by the inputs of a call."""
    always = [axis for tensor in op.inputs.values() if not tensor.optional for axis in tensor.axes]
    ones = Counter(set().union(*map(names_in, always)))
    sizes = sizes_in((axis, size_of(axis, ones)) for axis in always)
    for name, tensor in op.inputs.items():
        missing = set[str]().union(*map(names_in, tensor.axes)) - set(sizes)
        free = missing - set(tensor.axes) if tensor.optional else missing
        text = f"input {name!r} ({tensor.shape}) does not tell the size of {sorted(missing)}: "
        require(not free, op.name, f"{text}give an input that axis alone, or a multiple of it")
    for params in ({}, *(case.params for case in [*op.cases, *op.timed])):
        for name, output in op.outputs_for(params).items():
            missing = set[str]().union(*map(names_in, output.axes)) - set(sizes)
            text = f"output {name!r} has unknown dimensions {sorted(missing)}: {_KNOWN_DIMENSIONS}"
            require(not missing, op.name, text)


def _check_cases(op: Declared) -> None:
    """Each case has the op's dimensions, and names no input or parameter that it lacks."""
    axes = [axis for tensor in op.inputs.values() for axis in tensor.axes]
    needed = set[str]().union(*map(names_in, axes))
    optional = {name for name, tensor in op.inputs.items() if tensor.optional}
    for case in [*op.cases, *op.timed]:
        lists = {name for name in op.leading if isinstance(case.dims.get(name), tuple)}
        faults = {
            "lacks dimensions": needed - set(case.dims),
            "sets unknown parameters": set(case.params) - set(op.params),
            "sets values of unknown": set(case.values) - set(op.inputs),
            "is without what is not optional:": set(case.without) - optional,
            "is timed: give one size to": lists if case in op.timed else (),
        }
        for what, wrong in faults.items():
            require(not wrong, op.name, f"case {case} {what} {sorted(wrong)}")
    for name, overrides in op.extremes.items():
        unknown = set(overrides) - set(op.inputs)
        require(not unknown, op.name, f"extreme {name!r} overrides unknown {sorted(unknown)}")


def check_traits(op: Declared, provider: str, traits: Mapping[str, Any]) -> None:
    """The traits of a provider name what its op has, and its slack is one."""
    allowed = {
        "overwrites": [*op.inputs, *op.outputs],
        "frozen": op.differentiable,
        "output_dtypes": op.outputs,
    }
    for trait, names in allowed.items():
        for name in traits.get(trait, ()):
            text = f"{trait} of {provider!r} names {name!r}: use {', '.join(names) or 'none'}"
            require(name in names, op.name, text)
    for dtype, slack in traits.get("slack", {}).items():
        text = f"slack of {provider!r} is {slack} for {dtype}: use 0 to {MOST_SLACK:.0f}"
        require(0 < slack <= MOST_SLACK, op.name, text)


def check_signature(op: Declared, provider: str, function: Callable[..., Any]) -> None:
    """Inputs come first and in order, parameters by name: a swapped pair must not register.

    An argument may carry its shape as a suffix: ``x_BTD`` is the input ``x``. What else has a
    default may be there too, and is left at it.
    """
    parameters = inspect.signature(function).parameters
    declared = [*op.inputs, *op.params]
    names = [name if name in declared else _SUFFIX.sub("", name) for name in parameters]
    needed = [parameter.default is inspect.Parameter.empty for parameter in parameters.values()]
    pairs = zip(names, needed, strict=True)
    same = [name for name, need in pairs if need or name in declared] == declared
    text = f"{provider!r} takes ({', '.join(parameters)}), declared are ({', '.join(declared)})"
    require(same, op.name, text)
