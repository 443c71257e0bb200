"""The search: every point of a list, until one is wrong."""

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch

from tinyllama.harness.check.boundary_judge import boundary_fault
from tinyllama.harness.check.finding import Candidate, Finding, Outcome, Rank, Unsupported
from tinyllama.harness.check.judge import ENDLESS
from tinyllama.harness.check.points import (
    EMPTY,
    SIZES,
    UPSTREAM,
    VALUES,
    Point,
    empty_points,
    rows,
    size_points,
    upstream_points,
    value_points,
)
from tinyllama.harness.check.resizing import general
from tinyllama.harness.check.work import Budget

MOST_ACCESSES = 3000  # loads and stores of interpreted programs, of which a thousand take 0.2 s
SEARCHES: dict[str, tuple[Callable[[Candidate], Iterator[Point]], str]] = {
    # What is tried, and what it means that there is nothing.
    SIZES: (size_points, "no axis can have another length"),
    VALUES: (value_points, "no input may have any value, and no parameter another one"),
    UPSTREAM: (upstream_points, "it has no gradients"),
    EMPTY: (empty_points, "it has no batch"),
}


def search(name: str) -> Callable[[Candidate], Finding | str]:
    """The check that tries the points of one of `SEARCHES`; its answer is the first fault, else the
    number of points whose programs make few accesses, predicted from shorter lengths."""
    points_of, none = SEARCHES[name]

    def check(candidate: Candidate) -> Finding | str:
        op = candidate.op
        if candidate.provider.name == "eager":
            raise Unsupported("the reference is what results are compared with")
        if (name == UPSTREAM and not op.differentiable) or (
            name == EMPTY and (op.mutated or not rows(candidate))
        ):
            raise Unsupported(none)
        budget, count = Budget(candidate, general(candidate)), 0

        def affordable() -> Iterator[Point]:
            nonlocal count
            for point in points_of(candidate):
                if budget.accesses(point.case, point.axes) <= MOST_ACCESSES:
                    count += 1
                    yield point

        fault = first_fault(candidate, affordable(), budget)
        if not count:
            raise Unsupported(none)
        return fault or f"{count} points"

    return check


def first_fault(
    candidate: Candidate, points: Iterable[Point], budget: Budget | None = None
) -> Finding | None:
    """The first fault that is an accusation; else the first refusal, or else warning. budget:
    learns how many accesses points of another length make."""
    lesser: Finding | None = None
    for point in points:
        with torch.no_grad() if point.case.wanted == () else contextlib.nullcontext():
            finding, accesses = boundary_fault(candidate, point)
        if budget and len(point.axes) == 1 and not point.case.varied:
            budget.add(point.case, *point.axes, accesses)
        if finding is None or (point.parameter and finding.rank is Rank.REFUSED):
            continue  # nobody has to take a parameter's value that no case declares
        if finding.outcome is Outcome.BLOCKED:
            if ENDLESS in finding.message:  # larger ones would not end either
                break
        elif finding.rank in (Rank.WRONG, Rank.UNSAFE):
            return finding
        elif lesser is None or (finding.rank is Rank.REFUSED and lesser.rank is Rank.WARNING):
            lesser = finding
    return lesser
