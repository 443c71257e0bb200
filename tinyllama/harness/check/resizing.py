"""A case at another size of one axis: which case is taken, and the values that it may have."""

import math
from dataclasses import replace
from typing import Any

import torch

from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.evaluate import sampled, shapes_of
from tinyllama.harness.check.finding import Candidate

DRAWN = 4096  # integers, of which the least and the largest are taken
TRIES = 8  # following sizes that are tried where an op or a provider does not take one


def general(candidate: Candidate) -> OpCase:
    """The case that an op declares first, if a wrong result shows there; it should be general."""
    first, dtype = candidate.op.cases[0], candidate.dtypes[0]
    cases = (case for case in candidate.plain_cases() if case.case is first and case.dtype is dtype)
    case = next(cases, None)
    return case if case is not None and candidate.tells(case) else candidate.telling()


def resized(candidate: Candidate, base: OpCase, axis: str, size: int) -> OpCase | None:
    """The case with about this size of an axis; None where the op or the provider takes none."""
    op, before = candidate.op, base.case.dims.get(axis)
    if before is None:  # a number, or computed from the sizes of others
        return None
    for more in range(TRIES):
        new: Any = size + more
        if isinstance(before, tuple):
            new = (new, *before[1:])
        case = replace(base, case=base.case.resized(**{axis: new}))
        fits = op.misfit(case.case.dims, case.case.params) is None
        if fits and case.unsupported() is None:
            return case
    return None


def draws_for(candidate: Candidate, case: OpCase, name: str) -> list[torch.Tensor]:
    """Draws of an input in its declared shapes, which its distribution may need, until they are at
    least `DRAWN` values."""
    declared = candidate.op.inputs[name]
    values = case.case.values.get(name) or declared.distribution(case.case.dims)
    shapes = shapes_of(declared, case.case.dims)
    times = math.ceil(DRAWN / max(1, sum(map(math.prod, shapes))))
    return [
        sampled(name, values, shape, f"{name}|{place}|{time}|{candidate.seed}", "cpu")
        for time in range(times)
        for place, shape in enumerate(shapes)
    ]
