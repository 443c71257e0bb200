"""Results on the cases that follow from a declaration, each fault under its own name."""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace

from tinyllama.harness.check.boundary_judge import boundary_fault
from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.finding import Candidate, Finding, Outcome, Rank, Unsupported
from tinyllama.harness.check.judge import (
    BOUNDS,
    ENDLESS,
    GRADIENTS,
    OUTPUTS,
    TOUCHED,
    UNWRITTEN,
    faults,
)
from tinyllama.harness.check.layouts import REPEATING
from tinyllama.harness.check.points import Point

PLAIN = (OUTPUTS, GRADIENTS, UNWRITTEN, TOUCHED, BOUNDS)
EXTREMES, LAYOUTS, UPSTREAMS = "extreme values", "input layouts", "gradient layouts"
ABSENT, WANTED = "absent gradients", "wanted gradients"
VARIED = {  # why an op has no such case
    EXTREMES: "the op declares no extremes",
    LAYOUTS: "no input has an axis",
    UPSTREAMS: "it has no gradients",
    ABSENT: "the op has no two outputs of floating-point numbers",
    WANTED: "fewer than two inputs have gradients",
}
NAMES = (*(name for name in PLAIN if name != BOUNDS), *VARIED)  # that compare results
ALONE = ("distinct", "transposed")  # layouts that each input has alone, too


def check_plain(candidate: Candidate, only: Collection[str] = PLAIN) -> Iterator[Finding]:
    """The first fault of each check in plain cases, from small to large. What an error left
    uncompared is BLOCKED."""
    first: dict[str, Finding] = {}
    for case in candidate.plain_cases():
        of_case = list(faults(candidate, case))
        for finding in of_case:
            before = first.setdefault(finding.check, finding)
            if before.outcome is Outcome.BLOCKED and finding.outcome is not Outcome.BLOCKED:
                first[finding.check] = finding
        decided = {name for name, f in first.items() if f.outcome is not Outcome.BLOCKED}
        if decided >= {*only} or any(ENDLESS in finding.message for finding in of_case):
            break  # the other cases would not end either, and each of them takes seconds
    unrun = (Outcome.CRASHED, Outcome.BLOCKED)
    ended = next((f for f in first.values() if f.outcome in unrun), first.get(TOUCHED))
    for name in (name for name in PLAIN if name in only):
        if not candidate.plain_cases():
            yield Finding(name, Outcome.UNSUPPORTED, message="the provider covers no such case")
        elif name == GRADIENTS and not candidate.op.differentiable:
            yield Finding(name, Outcome.UNSUPPORTED, message="it has no gradients")
        elif name in first:
            yield first[name]
        elif ended is None:
            yield Finding(name, Outcome.PASSED)
        else:
            text = f"not compared, since {ended.check} ended the call: {ended.message}"
            yield Finding(name, Outcome.BLOCKED, ended.case, text)


def plain_faults(findings: Iterable[Finding]) -> list[str]:
    """The checks of plain cases that do not hold, so that no other case is compared; an access out
    of bounds is left out, and results are compared all the same."""
    return [f.check for f in findings if f.check in PLAIN[:-1] and not f.outcome.good]


def check_varied(name: str) -> Callable[[Candidate], Finding | None]:
    """The check of the cases that differ from plain ones in this way, one of `VARIED`. It tells the
    first fault, and a refusal only where no case has another one."""

    def check(candidate: Candidate) -> Finding | None:
        cases = [case for case in candidate.covered() if variation(case) == name]
        if not cases:
            declared = any(variation(case) == name for case in candidate.declared())
            raise Unsupported("the provider covers no such case" if declared else VARIED[name])
        if name == LAYOUTS:
            cases += _of_single_inputs(candidate, cases)
        refusal: Finding | None = None
        for case in cases:
            fault = next(faults(candidate, case), None)
            if fault is None or _is_excused(candidate, case, fault):
                continue
            text = f"; {case.alone} alone is {case.layout}" if case.alone else ""
            message = f"{fault.check}: {fault.message}{text}"
            fault = replace(fault, check=name, message=message, special=fault.rank)
            if fault.rank is not Rank.REFUSED:
                return fault
            refusal = refusal or fault
        return refusal

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


def _is_excused(candidate: Candidate, case: OpCase, fault: Finding) -> bool:
    """Whether a layout is refused that the provider declares not to take; or a result of an extreme
    or of inputs that repeat, so that terms may cancel, is right by the measure of undeclared
    cases."""
    if fault.rank is Rank.REFUSED:
        return candidate.provider.contiguous and case.layout != "contiguous"
    repeats = {case.layout, case.upstream} & {*REPEATING}
    if not (case.extreme or repeats) or fault.check not in (OUTPUTS, GRADIENTS):
        return False
    if fault.outcome is not Outcome.FAILED:
        return False
    lenient, _ = boundary_fault(candidate, Point(EXTREMES, "", case))
    return lenient is None or lenient.rank is Rank.WARNING
