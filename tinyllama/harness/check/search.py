"""The search: every point of a list, until one is wrong."""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping

import torch

from tinyllama.harness.check.boundary_judge import boundary_fault
from tinyllama.harness.check.finding import Candidate, Finding, Outcome, Rank, Unsupported
from tinyllama.harness.check.judge import ENDLESS
from tinyllama.harness.check.points import Point, accesses_of, size_points, value_points
from tinyllama.harness.check.resizing import general
from tinyllama.harness.check.work import Growth, work_of

MOST_ACCESSES = 3000  # loads and stores of interpreted programs, of which a thousand take 0.2 s


def sizes(candidate: Candidate) -> Finding | str:
    """Results are right along each axis, and of two axes at once. Raises Unsupported where no axis
    can be any longer."""
    return _search(candidate, size_points(candidate), "no axis can have another length")


def special_values(candidate: Candidate) -> Finding | str:
    """Results are the reference's for values that random inputs never have, and for other
    parameters. Raises Unsupported where no input may have other values, and no parameter either."""
    points = value_points(candidate)
    return _search(candidate, points, "no input may have any value, and no parameter another one")


def _search(candidate: Candidate, points: Iterable[Point], none: str) -> Finding | str:
    """The first fault, else the number of points that were tried: those whose programs make few
    accesses, predicted from shorter lengths."""
    if candidate.provider.name == "eager":
        raise Unsupported("the reference is what results are compared with")
    base, count = general(candidate), 0
    accesses = accesses_of(candidate, base)
    growth = {axis: Growth(n, accesses) for axis, n in base.case.dims.items() if isinstance(n, int)}

    def affordable() -> Iterator[Point]:
        nonlocal count
        for point in points:
            dims = point.case.case.dims
            times = math.prod(growth[axis].times(dims[axis]) for axis in point.axes)
            if accesses * times <= MOST_ACCESSES:
                count += 1
                yield point

    fault = first_fault(candidate, affordable(), growth)
    if not count:
        raise Unsupported(none)
    return fault or f"{count} points"


def first_fault(
    candidate: Candidate, points: Iterable[Point], growth: Mapping[str, Growth] | None = None
) -> Finding | None:
    """The first fault that is an accusation; else the first refusal, or else warning. growth: by
    axis, learns how many accesses points of another length make."""
    lesser: Finding | None = None
    endless = math.inf
    for point in points:
        work = work_of(candidate.op, point.case.case, point.case.dtype)
        if work >= endless:
            continue
        with torch.no_grad() if point.case.wanted == () else contextlib.nullcontext():
            finding, accesses = boundary_fault(candidate, point)
        if growth and len(point.axes) == 1 and not point.case.varied:
            (axis,) = point.axes
            growth[axis].add(point.case.case.dims[axis], accesses)
        if finding is None or (point.parameter and finding.rank is Rank.REFUSED):
            continue  # nobody has to take a parameter's value that no case declares
        if finding.outcome is Outcome.BLOCKED:
            endless = work if ENDLESS in finding.message else endless
        elif finding.rank in (Rank.WRONG, Rank.UNSAFE):
            return finding
        elif lesser is None or (finding.rank is Rank.REFUSED and lesser.rank is Rank.WARNING):
            lesser = finding
    return lesser
