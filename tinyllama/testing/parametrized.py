"""Cases for a test of a kernel, from the shapes of its inputs alone."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tinyllama.harness.check.evaluate import sampled
from tinyllama.harness.check.layouts import LAYOUTS, laid_out
from tinyllama.harness.declare.specs import FLOATS, size_of
from tinyllama.harness.declare.values import integers, normal
from tinyllama.harness.kernels.precision import SHORT
from tinyllama.harness.machine.device import default_device
from tinyllama.harness.machine.errors import UsageError
from tinyllama.testing.shapes import InputShape, parse_shapes

# Where blocks of powers of two begin and end: the smallest, powers, three more, and 3 * 2^k.
LENGTHS = (1, 67, 2, 259, 48, 3, 128, 131, 384, 8, 1027, 1024)
FEW = (1, 2, 3, 5)  # of the outer axes, where a tensor would be large
MOST_ELEMENTS = 2**16  # of a tensor, which an interpreter is to take less than a second for
USUAL = 1  # the place in `LENGTHS` of the case that is tried in every layout


@dataclass(frozen=True)
class KernelCase:
    """Inputs of one call, as `kernel_cases` makes them.

    shape: the length of each axis by its name.
    dtype: of floating-point inputs that have no fixed one.
    layout: where they lie in memory.
    """

    inputs: dict[str, InputShape]
    shape: dict[str, int]
    dtype: torch.dtype
    layout: str = "contiguous"

    def __str__(self) -> str:
        """As ``N67-D259-bf16-strided``."""
        words = [*(f"{name}{length}" for name, length in self.shape.items()), SHORT[self.dtype]]
        return "-".join(words + ([self.layout] if self.layout != "contiguous" else []))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The inputs in their order, on the first GPU or else the CPU, the same in each call.

        Floating-point values are drawn from a normal distribution, integers below their bound.
        """
        drawn = []
        outer = next(iter(self.inputs.values())).axes[:1]
        for place, (name, one) in enumerate(self.inputs.items()):
            below = one.below if one.below.isdecimal() else self.shape.get(one.below, 2)
            values = normal() if one.floating else integers(int(below))
            shape = _shape(one, self.shape)
            sample = sampled(name, values, shape, f"{self}|{name}", "cpu")
            dtype = getattr(torch, one.dtype.removeprefix("torch.")) if one.dtype else self.dtype
            batched = self.layout != "expanded" or one.axes[:1] == outer
            layout = self.layout if batched else "contiguous"
            drawn.append(laid_out(sample, dtype, default_device(), layout, place + 1))
        return tuple(drawn)


def kernel_cases(shapes: str, *, dtypes: Sequence[torch.dtype] = FLOATS) -> Callable[[Any], Any]:
    """Parametrise a test with cases that often show what is wrong with a kernel.

        @kernel_cases("x: N D, w: D")
        def test_rms_norm(case):
            assert_accurate(rms_norm, reference, *case.tensors)

    The test takes a `KernelCase` as ``case``. Its dozen sizes are next to where blocks of powers of
    two end, each in one of the dtypes; one size is tried in each memory layout too.

    shapes: see `tinyllama.testing.shapes`; of one input, its axes are enough: ``"N D"``.

    Raises UsageError for shapes that cannot be read, and for no dtypes.
    """
    import pytest

    cases = list(_cases(parse_shapes(shapes), dtypes))
    return pytest.mark.parametrize("case", [pytest.param(case, id=str(case)) for case in cases])


def _cases(inputs: dict[str, InputShape], dtypes: Sequence[torch.dtype]) -> Iterator[KernelCase]:
    unknown = [dtype for dtype in dtypes if dtype not in SHORT]
    if unknown or not dtypes:
        raise UsageError(f"dtypes={list(dtypes)}: use some of {', '.join(map(str, SHORT))}")
    names = list(dict.fromkeys(name for one in inputs.values() for name in one.dimensions))
    for place in range(len(LENGTHS)):
        yield KernelCase(inputs, _lengths(inputs, names, place), dtypes[place % len(dtypes)])
    for place, layout in enumerate(LAYOUTS[1:]):
        lengths = _lengths(inputs, names, USUAL)
        yield KernelCase(inputs, lengths, dtypes[place % len(dtypes)], layout)


def _lengths(inputs: dict[str, InputShape], names: Sequence[str], place: int) -> dict[str, int]:
    """Of each axis another one of `LENGTHS`; of the outer ones few, as far as tensors are large."""
    count = len(LENGTHS)
    lengths = {
        name: LENGTHS[(place + 5 * axis) % count] for axis, name in enumerate(reversed(names))
    }
    for axis, name in enumerate(names):
        if max(math.prod(_shape(one, lengths)) for one in inputs.values()) > MOST_ELEMENTS:
            lengths[name] = FEW[(place + axis) % len(FEW)]
    return {name: lengths[name] for name in names}


def _shape(one: InputShape, lengths: dict[str, int]) -> tuple[int, ...]:
    return tuple(size_of(axis, lengths) for axis in one.axes)
