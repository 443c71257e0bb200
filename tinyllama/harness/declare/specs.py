"""What a declaration is made of: tensors, cases, and the signature that they belong to.

Shapes are strings of axes: ``"B T D"`` is a tensor with three of them, ``""`` a scalar. An axis is
the name of a dimension, a number, or a sum of products and quotients of these, as in ``"N 2*R"``
and ``"N D/2+1"``. A dimension whose size in a case is a tuple, such as ``N=(1000, 1)``, belongs to
inputs declared ``many``: they are lists of tensors, one for each size.
"""

import copy
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from tinyllama.harness.declare.values import Values, normal

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TIMED_LAYOUTS = ("strided", "transposed")  # of `tinyllama.harness.check.layouts.LAYOUTS`
STANDARD = normal()


class Terms(NamedTuple):
    """How terms that may cancel are rounded: ``rounded_to`` and ``shared`` of
    `tinyllama.harness.declare.op.Op.magnitude`."""

    dtype: torch.dtype | None = None
    shared: bool = False


class DeclarationError(ValueError):
    """A declaration that contradicts itself; the message names the op, the part and the fix."""


@dataclass(frozen=True)
class Tensor:
    """A declared input or output: ``Tensor("N D", grad=True)``.

    shape: its axes, separated by spaces; ``""`` is a scalar.
    grad: the gradient of an input is compared in every case.
    dtype: a fixed dtype; None is the floating-point dtype of the case.
    values: the distribution from which an input is drawn (`tinyllama.harness.values`), or a
        function of a case's sizes that returns one. An input of integers or booleans needs it.
    optional: an input that may be None. The op's first case is also tried without it.
    mutated: an input that the op writes in place; it is compared after the calls, as an output is.
    many: an input that is a list of tensors, one for each size of a dimension whose size is a
        tuple.
    shape_by: of an output whose shape depends on the op's parameters: a function of these that
        returns the shape. ``shape`` is then the shape for the defaults.
    off_by: of an output of integers: how far an element may be from the reference's, as a rounded
        value at a tie; of as few elements as the reference itself is undecided about.
    dtype_of: for a tensor that a provider saves: a function of the op's first input that returns
        the saved tensor's dtype.
    """

    shape: str
    grad: bool = False
    dtype: torch.dtype | None = None
    values: Values | Callable[[Mapping[str, Any]], Values] = STANDARD
    optional: bool = False
    mutated: bool = False
    many: bool = False
    dtype_of: Callable[[torch.Tensor], torch.dtype] | None = None
    shape_by: Callable[[Mapping[str, Any]], str] | None = None
    off_by: int = 0

    @property
    def floating(self) -> bool:
        """Whether it holds floating-point values, which have gradients and roundings."""
        return self.dtype is None or self.dtype.is_floating_point

    def dtype_beside(self, first: torch.Tensor) -> torch.dtype:
        """Its dtype in a call whose first input is ``first``."""
        return self.dtype_of(first) if self.dtype_of else self.dtype or first.dtype

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.shape.split())

    def distribution(self, dims: Mapping[str, Any]) -> Values:
        """The distribution for a case with these dims."""
        return self.values if isinstance(self.values, Values) else self.values(dims)


@dataclass(init=False)
class Case:
    """One shape of an op: ``Case(N=3, D=100, why="a width that no power of two divides")``.

    dims: the size of each dimension. A tuple is the sizes of several tensors (``many``), or of one
        of the op's ``leading`` dimensions those of any number of axes.
    why: what can go wrong in this case.
    params: parameters in place of the op's defaults.
    values: distributions of inputs in place of the declared ones.
    without: the optional inputs that are None, see `lacking`.
    """

    dims: Mapping[str, Any]
    why: str
    params: Mapping[str, Any]
    values: Mapping[str, Values]
    without: tuple[str, ...]

    def __init__(
        self,
        *,
        why: str = "",
        params: Mapping[str, Any] | None = None,
        values: Mapping[str, Values] | None = None,
        **dims: int | tuple[int, ...],
    ) -> None:
        self.dims, self.why, self.without = dims, why, ()
        self.params, self.values = dict(params or {}), dict(values or {})

    def resized(self, **dims: int | tuple[int, ...]) -> "Case":
        """The same case with other sizes of some dimensions."""
        case = copy.copy(self)
        case.dims = {**self.dims, **dims}
        return case

    def lacking(self, *names: str) -> "Case":
        """The same case without these optional inputs: ``Case(N=3).lacking("bias")``."""
        case = copy.copy(self)
        case.without = names
        return case

    def __str__(self) -> str:
        sizes = "".join(
            f"{name}{'x'.join(map(str, flat([size])))}" for name, size in self.dims.items()
        )
        params = [f"{name}={value}" for name, value in self.params.items()]
        return ",".join([sizes, *params, *(f"no_{name}" for name in self.without)])


@dataclass(eq=False)
class Signature:
    """What an op takes and returns.

    inputs: declared tensors by name, in the order of the reference's arguments.
    outputs: declared tensors by name (a bare shape string will do); empty for in-place ops.
    params: keyword parameters and their defaults.
    leading: the first dimensions of the first input, which a call may replace by any number of
        axes, the same ones in every tensor that begins with these dimensions.
    """

    name: str
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Any]  # given as Tensor or shape string, held as Tensor
    params: Mapping[str, Any] = field(default_factory=dict)
    leading: tuple[str, ...] = ()

    def sizes_of(self, declared: Tensor, shape: Sequence[int]) -> list[tuple[str, Any]] | None:
        """Each dimension of a tensor with its size in a shape; None where they do not fit. Of more
        or fewer leading axes than declared, all are the first dimension, as a tuple."""
        axes, leads = declared.axes, len(self.leading)
        if len(shape) == len(axes):
            return list(zip(axes, shape, strict=True))
        front = len(shape) - len(axes) + leads
        if not leads or axes[:leads] != self.leading or front < 0:
            return None
        sizes = [tuple(shape[:front]), *[()] * (leads - 1), *shape[front:]]
        return list(zip(axes, sizes, strict=True))

    def numbers(self, dims: Mapping[str, Any]) -> dict[str, Any]:
        """The sizes of a case or a call for a declaration's own rules: each leading dimension is
        one number, the product of its axes where there are several or none."""
        return {
            name: math.prod(size) if name in self.leading and isinstance(size, tuple) else size
            for name, size in dims.items()
        }

    def outputs_for(self, params: Mapping[str, Any]) -> dict[str, Tensor]:
        """The outputs of a call with these parameters, of which defaults may be left out."""
        values = {**self.params, **params}
        return {
            name: replace(output, shape=output.shape_by(values)) if output.shape_by else output
            for name, output in self.outputs.items()
        }

    @property
    def mutated(self) -> tuple[str, ...]:
        return tuple(name for name, tensor in self.inputs.items() if tensor.mutated)

    @property
    def differentiable(self) -> tuple[str, ...]:
        return tuple(name for name, tensor in self.inputs.items() if tensor.grad)


def flat(sizes: Iterable[Any]) -> tuple[int, ...]:
    """A shape, from the sizes of dimensions of which some are any number of axes."""
    lengths = (size if isinstance(size, tuple) else (size,) for size in sizes)
    return tuple(itertools.chain.from_iterable(lengths))


def shape_of(axes: Sequence[str], sizes: Mapping[str, Any]) -> list[int]:
    """The shape of declared axes, of which a leading dimension may be several."""
    return list(flat(sizes[axis] if axis in sizes else size_of(axis, sizes) for axis in axes))


def names_in(axis: str) -> set[str]:
    """The dimensions that `size_of` reads for an axis."""
    return {name for name in re.split(r"[+*/]", axis) if not name.isdecimal()}


def sizes_in(axes: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The sizes of the dimensions of axes, of which each is there with its size; also of those that
    only computed axes tell: R where an axis ``2*R`` has 6 elements."""
    axes = list(axes)
    sizes = {axis: size for axis, size in axes if axis.isidentifier()}
    computed = [(axis, size) for axis, size in axes if not axis.isidentifier()]
    for _ in computed:  # each may need a dimension that another one tells
        for axis, size in computed:
            unknown = names_in(axis) - sizes.keys()
            if len(unknown) != 1 or "/" in axis:  # a quotient may have several sizes
                continue
            (name,) = unknown
            least, following = (size_of(axis, {**sizes, name: length}) for length in (0, 1))
            length = (size - least) // (following - least) if following > least else -1
            if length >= 0 and size_of(axis, {**sizes, name: length}) == size:
                sizes[name] = length
    return sizes


def size_of(axis: str, sizes: Mapping[str, Any]) -> int:
    """The size of a declared axis: a dimension's name, or a sum of terms such as Q+2*R, Q/C. A
    dimension of several axes is their product."""

    def value(name: str) -> int:
        size = sizes[name] if name.isidentifier() else int(name)
        return math.prod(size) if isinstance(size, tuple) else size

    total = 0
    for term in axis.split("+"):
        over, *under = term.split("/")
        total += math.prod(map(value, over.split("*"))) // math.prod(map(value, under))
    return total
