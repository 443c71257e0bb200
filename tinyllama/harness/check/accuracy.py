"""Results on every case that follows from the declaration, each fault under its own name.

Where plain cases are wrong, varied ones are not tried: they would tell the same fault again.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.finding import Candidate, Finding, Outcome, Rank
from tinyllama.harness.check.judge import (
    BOUNDS,
    ENDLESS,
    GRADIENTS,
    OUTPUTS,
    TOUCHED,
    UNWRITTEN,
    boundary_fault,
    faults,
    run_case,
)
from tinyllama.harness.check.layouts import REPEATING
from tinyllama.harness.check.points import Point

# In the order in which they are tried: each one assumes that those before it pass.
EXTREMES, LAYOUTS, UPSTREAMS = "extreme values", "input layouts", "gradient layouts"
ABSENT, WANTED = "absent gradients", "wanted gradients"
PLAIN = (OUTPUTS, GRADIENTS, UNWRITTEN, TOUCHED)
VARIED = (EXTREMES, LAYOUTS, UPSTREAMS, ABSENT, WANTED)
NAMES = (*PLAIN, *VARIED)
ALL = (*NAMES, BOUNDS)  # BOUNDS: in whatever case
NONE = {  # why an op has no such case
    GRADIENTS: "it has no gradients",
    UPSTREAMS: "it has no gradients",
    EXTREMES: "the op declares no extremes",
    ABSENT: "the op has no two outputs of floating-point numbers",
    WANTED: "fewer than two inputs have gradients",
}
ALONE = ("distinct", "transposed")  # layouts that each input has alone, too


def check(candidate: Candidate, only: Collection[str] = ALL) -> Iterator[Finding]:
    """A finding for each of these names of `ALL`; UNSUPPORTED where the op has no case for it.

    Where `BOUNDS` alone is asked for, no result is compared.
    """
    compared = set(only) != {BOUNDS}
    cases = candidate.covered()
    plain = [case for case in cases if not case.varied]
    found = _of_plain(candidate, plain, only, compared)
    tried = {OUTPUTS, UNWRITTEN, TOUCHED, BOUNDS} if plain else set()
    if plain and candidate.op.differentiable:
        tried.add(GRADIENTS)
    tried |= {variation(case) for case in cases if case.varied}
    if wrong := plain_faults(found.values()):
        text = f"fails already: {', '.join(wrong)}"
        blocked = (name for name in VARIED if name in tried)
        found.update({name: Finding(name, Outcome.BLOCKED, message=text) for name in blocked})
    else:
        varied = [c for c in cases if c.varied and (variation(c) in only or not compared)]
        varied += _alone(candidate, cases) if LAYOUTS in only or not compared else []
        _of_varied(candidate, varied, found, compared)
    if candidate.unheld:
        text = f"canaries alone tell of {', '.join(candidate.unheld)}: a tensor holds addresses"
        found.setdefault(BOUNDS, Finding(BOUNDS, Outcome.PASSED, message=text))
    declared = {variation(case) for case in candidate.declared() if case.varied} | {*PLAIN, BOUNDS}
    declared -= set() if candidate.op.differentiable else {GRADIENTS}
    for name in (name for name in ALL if name in only):
        if name in tried:
            yield found.get(name, Finding(name, Outcome.PASSED))
        else:
            why = "the provider covers no such case" if name in declared else NONE[name]
            yield Finding(name, Outcome.UNSUPPORTED, message=why)


def _of_plain(
    candidate: Candidate, cases: Iterable[OpCase], only: Collection[str], compared: bool
) -> dict[str, Finding]:
    """The first fault of each check in plain cases; what an error left uncompared is BLOCKED."""
    found: dict[str, Finding] = {}
    for case in cases:
        if (text := candidate.ended.get(str(case))) is not None:
            of_case = [_ended(case, text)]
        else:
            of_case = list(faults(candidate, case, compared=compared))
        for finding in of_case:
            before = found.setdefault(finding.check, finding)
            if before.outcome is Outcome.BLOCKED and finding.outcome is not Outcome.BLOCKED:
                found[finding.check] = finding
        asked = {*PLAIN, BOUNDS} & set(only)
        if asked <= {n for n, f in found.items() if f.outcome is not Outcome.BLOCKED}:
            break
        if str(case) in candidate.ended or any(ENDLESS in f.message for f in of_case):
            break  # the other cases would end so, too, and each of them takes seconds
    ended = next(
        (f for f in found.values() if f.outcome in (Outcome.CRASHED, Outcome.BLOCKED)), None
    )
    ended = ended or found.get(TOUCHED)
    if ended is not None:
        text = f"not compared, since {ended.check} ended the call: {ended.message}"
        unknown = [*PLAIN, BOUNDS] if candidate.op.differentiable else [OUTPUTS, UNWRITTEN, TOUCHED]
        for name in unknown:
            found.setdefault(name, Finding(name, Outcome.BLOCKED, ended.case, text))
    return found


def _ended(case: OpCase, text: str) -> Finding:
    """That a process ended in a case before."""
    return Finding(OUTPUTS, Outcome.CRASHED, str(case), text, special=Rank.WRONG)


def _of_varied(
    candidate: Candidate, cases: Iterable[OpCase], found: dict[str, Finding], compared: bool
) -> None:
    """The worst fault of each variation, the first one of its rank, is added to ``found``."""
    for case in cases:
        name = variation(case)
        before = found.get(name)
        if before is not None and before.rank is not Rank.REFUSED:
            continue
        if (text := candidate.ended.get(str(case))) is not None:
            fault: Finding | None = Finding(
                OUTPUTS, Outcome.CRASHED, str(case), text, special=Rank.WRONG
            )
        else:
            of_case = list(faults(candidate, case, compared=compared))
            for finding in of_case:
                if finding.check == BOUNDS:
                    found.setdefault(BOUNDS, finding)
            fault = next((f for f in of_case if f.check != BOUNDS), None)
        if fault is None or not compared:
            continue
        if fault.rank is Rank.REFUSED and candidate.provider.contiguous and name == LAYOUTS:
            continue  # refused, as declared
        if fault.outcome is Outcome.FAILED and _excused(candidate, case, fault):
            continue
        if before is None or fault.rank is not Rank.REFUSED:
            message = f"{fault.check}: {fault.message}"
            if case.alone:
                message += f"; {case.alone} alone is {case.layout}"
            elif name == LAYOUTS and fault.outcome is Outcome.FAILED:
                message += _alone_enough(candidate, case)
            found[name] = replace(fault, check=name, message=message, special=fault.rank)


def _alone(candidate: Candidate, cases: Collection[OpCase]) -> list[OpCase]:
    """Each input alone in another layout: a kernel may ask one input for the layout of all."""
    names = [name for name, declared in candidate.op.inputs.items() if declared.axes]
    first = next((case for case in cases if case.layout == ALONE[0]), None)
    if first is None or len(names) < 2:
        return []
    return [
        replace(first, layout=layout, alone=name)
        for layout, name in itertools.product(ALONE, names)
    ]


def _excused(candidate: Candidate, case: OpCase, fault: Finding) -> bool:
    """Whether a wrong result of an extreme, or of inputs that repeat, so that terms may cancel, is
    one that the lenient measure of undeclared cases grants."""
    repeated = {case.layout, case.upstream} & {*REPEATING}
    if not (case.extreme or repeated) or fault.check not in (OUTPUTS, GRADIENTS):
        return False
    lenient, _ = boundary_fault(candidate, Point(EXTREMES, "", case))
    return lenient is None or lenient.rank is Rank.WARNING


def _alone_enough(candidate: Candidate, case: OpCase) -> str:
    """Which inputs alone make a case wrong by their layout, in words; "" where none does."""
    contiguous = replace(case, layout="contiguous").inputs(candidate.device, candidate.seed)
    laid_out = case.inputs(candidate.device, candidate.seed)
    enough = []
    for name, value in laid_out.args.items():
        inputs = replace(contiguous, args={**contiguous.args, name: value})
        run = run_case(candidate, inputs)
        if run.error is not None or candidate.wrong(case, run.results, inputs):
            enough.append(name)
    return f"; {' or '.join(enough)} alone in this layout is enough" if enough else ""


def plain_faults(findings: Iterable[Finding]) -> list[str]:
    """The checks of plain cases that do not hold."""
    return [f.check for f in findings if f.check in PLAIN and not f.outcome.good]


def variation(case: OpCase) -> str:
    """The check that a varied case belongs to."""
    if case.extreme:
        return EXTREMES
    if case.layout != "contiguous":
        return LAYOUTS
    if case.upstream != "contiguous":
        return UPSTREAMS
    return ABSENT if case.absent else WANTED
