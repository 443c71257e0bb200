"""Results on declared cases and on points beyond them, each fault under its own name."""

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace

import torch

from tinyllama.harness.check.candidate import Candidate, Unsupported
from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.finding import Finding, Outcome, Rank
from tinyllama.harness.check.judge import ENDLESS, boundary_fault, faults
from tinyllama.harness.check.names import GRADIENTS, OUTPUTS, PLAIN, TOUCHED
from tinyllama.harness.check.points import (
    EMPTY,
    SIZES,
    UPSTREAM,
    VALUES,
    Budget,
    Point,
    empty_points,
    rows,
    size_points,
    upstream_points,
    value_points,
)
from tinyllama.harness.kernels.bounds import Bounds
from tinyllama.harness.kernels.launch import HAS_TRITON
from tinyllama.harness.kernels.precision import SHORT

EXTREMES, LAYOUTS, UPSTREAMS = "extreme values", "input layouts", "gradient layouts"
ABSENT, WANTED = "absent gradients", "wanted gradients"
VARIED = {  # why an op has no such case
    EXTREMES: "the op declares no extremes",
    LAYOUTS: "no input has an axis",
    UPSTREAMS: "it has no gradients",
    ABSENT: "the op has no two outputs of floating-point numbers",
    WANTED: "fewer than two inputs have gradients",
}
ALONE = ("distinct", "transposed")  # layouts that each input has alone, too
MOST_ENDLESS = 3  # points whose programs do not end, each of which takes seconds
SEARCHES: dict[str, tuple[Callable[[Candidate, Budget], Iterator[Point]], str]] = {
    # What is tried, and what it means that there is nothing.
    SIZES: (size_points, "no axis can have another length"),
    VALUES: (value_points, "no input may have any value, and no parameter another one"),
    UPSTREAM: (upstream_points, "it has no gradients"),
    EMPTY: (empty_points, "it has no batch"),
}


def check_plain(candidate: Candidate, only: Collection[str] = PLAIN) -> Iterator[Finding]:
    """The first fault of each check in plain cases, from small to large. What an error left
    uncompared is BLOCKED. A dtype in which a case could not be tried is noted in each finding."""
    first: dict[str, Finding] = {}
    untried: dict[torch.dtype, Finding] = {}
    for case in candidate.plain_cases():
        of_case = list(faults(candidate, case))
        for finding in of_case:
            if finding.outcome is Outcome.BLOCKED:
                untried.setdefault(case.dtype, finding)
            else:
                first.setdefault(finding.check, finding)
        if first.keys() >= {*only} or any(ENDLESS in finding.message for finding in of_case):
            break  # the other cases would not end either, and each of them takes seconds
    ended = next((f for f in first.values() if f.outcome is Outcome.CRASHED), first.get(TOUCHED))
    in_dtypes = ", ".join(SHORT[dtype] for dtype in candidate.dtypes if dtype in untried)
    if ended is None and len(untried) == len(candidate.dtypes):
        ended = next(iter(untried.values()), None)
    for name in (name for name in PLAIN if name in only):
        if not candidate.plain_cases():
            finding = Finding(name, Outcome.UNSUPPORTED, message="the provider covers no such case")
        elif name == GRADIENTS and not candidate.op.differentiable:
            finding = Finding(name, Outcome.UNSUPPORTED, message="it has no gradients")
        elif name in first:
            finding = first[name]
        elif ended is not None and name == ended.check:
            finding = ended
        elif ended is not None:
            text = f"not compared, since {ended.check} ended the call: {ended.message}"
            finding = Finding(name, Outcome.BLOCKED, ended.case, text)
        elif untried:
            reason = next(iter(untried.values())).message
            finding = Finding(name, Outcome.PASSED, message=f"not tried in {in_dtypes}: {reason}")
        else:
            text = untuned(candidate) if name == OUTPUTS else ""
            finding = Finding(name, Outcome.PASSED, message=text)
        yield replace(finding, untried=in_dtypes)


def untuned(candidate: Candidate) -> str:
    """Which kernels of the smallest case have several configurations under ``triton.autotune``, of
    which it runs in one; in words."""
    if not HAS_TRITON:
        return ""
    from tinyllama.harness.kernels.tuned import tuned

    with contextlib.suppress(Exception), tuned() as kernels, candidate.limits(Bounds()):
        candidate.results(candidate.inputs(candidate.smallest()))
    several = [f"{k.identity} has {len(k.configs)}" for k in kernels.values() if k.configs[1:]]
    text = f"in one configuration, {', '.join(several)}: --only configurations tries each"
    return text if several else ""


def plain_obstacle(findings: Iterable[Finding]) -> str:
    """Why no other case is compared, in words: checks of plain cases that fail, or could not be
    tried; "" without any. An access out of bounds is left out: results are compared all the same.
    """
    bad = [f for f in findings if f.check in PLAIN[:-1] and not f.outcome.good]
    failing = ", ".join(f.check for f in bad if f.outcome is not Outcome.BLOCKED)
    blocked = ", ".join(f.check for f in bad)
    return f"fails already: {failing}" if failing else blocked and f"not tried either: {blocked}"


def check_varied(name: str) -> Callable[[Candidate], Finding | str]:
    """The check of the cases that differ from plain ones in this way, one of `VARIED`."""

    def check(candidate: Candidate) -> Finding | str:
        cases = [case for case in candidate.covered() if variation(case) == name]
        if not cases:
            declared = any(variation(case) == name for case in candidate.declared())
            raise Unsupported("the provider covers no such case" if declared else VARIED[name])
        if name == LAYOUTS:  # of one input first, which tells whose layout it is
            cases = [*_of_single_inputs(candidate, cases), *cases]
        fault, _ = first_fault(candidate, (Point(name, case.layout_text, case) for case in cases))
        return "" if fault is None or fault.rank is Rank.WARNING else fault

    return check


def variation(case: OpCase) -> str:
    """The check that a varied case belongs to; "" for a plain case."""
    if case.extreme:
        return EXTREMES
    if case.layout != "contiguous":
        return LAYOUTS
    if case.upstream != "contiguous":
        return UPSTREAMS
    return ABSENT if case.absent else WANTED if case.wanted is not None else ""


def _of_single_inputs(candidate: Candidate, cases: Iterable[OpCase]) -> list[OpCase]:
    """Each input alone in another layout: a kernel may ask one input for the layout of all."""
    names = [name for name, declared in candidate.op.inputs.items() if declared.axes]
    first = next((case for case in cases if case.layout == ALONE[0]), None)
    if first is None or len(names) < 2:
        return []
    pairs = itertools.product(ALONE, names)
    return [replace(first, layout=layout, alone=name) for layout, name in pairs]


def search(name: str) -> Callable[[Candidate], Finding | str]:
    """The check that tries the points of one of `SEARCHES`; its answer is the first fault, else
    the number of points that were tried, and how far they went."""
    points_of, none = SEARCHES[name]

    def check(candidate: Candidate) -> Finding | str:
        op = candidate.op
        if candidate.provider.name == "eager":
            raise Unsupported("the reference is what results are compared with")
        if (name == UPSTREAM and not op.differentiable) or (
            name == EMPTY and (op.mutated or not rows(candidate))
        ):
            raise Unsupported(none)
        budget = Budget(candidate)
        fault, count = first_fault(candidate, points_of(candidate, budget), budget)
        if not count:
            raise Unsupported(budget.text() or none)
        return fault or "; ".join(filter(None, (f"{count} points", budget.text())))

    return check


def first_fault(
    candidate: Candidate, points: Iterable[Point], budget: Budget | None = None
) -> tuple[Finding | None, int]:
    """The first fault that is an accusation; else the first refusal, or else warning; or what is
    BLOCKED where nothing could be tried. And the number of points at which the reference gave a
    result. budget: is told what each point cost."""
    lesser: Finding | None = None
    blocked: list[Finding] = []
    count = endless = 0
    for point in points:
        with torch.no_grad() if point.case.wanted == () else contextlib.nullcontext():
            tried = boundary_fault(candidate, point)
        if tried is None:
            continue
        finding, accesses = tried
        count += 1
        if budget:
            budget.add(point, accesses)
        if finding is None or (point.parameter and finding.rank is Rank.REFUSED):
            continue  # nobody has to take a parameter's value that no case declares
        if finding.outcome is Outcome.BLOCKED:
            blocked.append(finding)
            endless += ENDLESS in finding.message
            if endless == MOST_ENDLESS:
                break
        elif finding.rank in (Rank.WRONG, Rank.UNSAFE):
            return finding, count
        elif lesser is None or (finding.rank is Rank.REFUSED and lesser.rank is Rank.WARNING):
            lesser = finding
    if blocked and len(blocked) == count:
        lesser = blocked[0]
    return lesser, count
