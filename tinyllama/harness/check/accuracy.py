"""Results on every case that follows from the declaration, each fault under its own name.

All cases run on poisoned memory, and `tinyllama.harness.check.compare` judges their results.
Where a fault ends a call, the rest is compared with that fault worked around (the forward pass
alone, copies of inputs), or is BLOCKED: nothing passes that was not compared. So are varied inputs
where plain cases are wrong, and they are not tried where plain outputs are.
"""

import contextlib
import itertools
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.compare import SLACK, Comparison
from tinyllama.harness.check.crash import (
    crashed,
    in_backward,
    place,
    raised_by_another,
    refuses,
)
from tinyllama.harness.check.evaluate import (
    ChangedInputError,
    ContractError,
    GradientError,
    evaluate,
    is_gradient,
)
from tinyllama.harness.check.finding import Candidate, Finding, Outcome, Rank
from tinyllama.harness.check.guards import GuardedMemory
from tinyllama.harness.check.layouts import LAYOUTS as LAYOUT_NAMES
from tinyllama.harness.check.layouts import RARE, TIED
from tinyllama.harness.check.poison import PoisonedMemory

# In the order in which they are tried: each one assumes that those before it pass.
OUTPUTS, GRADIENTS = "outputs", "gradients"
UNWRITTEN, TOUCHED = "unwritten memory", "untouched inputs"
EXTREMES, LAYOUTS, UPSTREAMS = "extreme values", "input layouts", "gradient layouts"
ABSENT, WANTED = "absent gradients", "wanted gradients"
PLAIN = (OUTPUTS, GRADIENTS, UNWRITTEN, TOUCHED)
VARIED = (EXTREMES, LAYOUTS, UPSTREAMS, ABSENT, WANTED)
NAMES = (*PLAIN, *VARIED)
BOUNDS = "out of bounds"  # in whatever case
ALL = (*NAMES, BOUNDS)
NONE = {  # why an op has no such case
    GRADIENTS: "it has no gradients",
    UPSTREAMS: "it has no gradients",
    EXTREMES: "the op declares no extremes",
    ABSENT: "the op has no two outputs of floating-point numbers",
    WANTED: "fewer than two inputs have gradients",
}
LITTLE = 256.0  # times the allowed error
ALONE = "distinct"  # of which each input is tried alone, too
OTHER = [layout for layout in (*LAYOUT_NAMES, *RARE) if layout != "contiguous"]
ENDLESS = "EndlessLoopError"  # of `tinyllama.harness.kernels.interpreter`, which needs triton


def check(candidate: Candidate, only: Collection[str] = ALL) -> Iterator[Finding]:
    """A finding for each of these names of `ALL`; UNSUPPORTED where the op has no case for it.

    Where `BOUNDS` alone is asked for, no result is compared.
    """
    cases = candidate.covered()
    declared = {OUTPUTS, UNWRITTEN, TOUCHED, BOUNDS}
    declared |= {GRADIENTS} if candidate.op.differentiable else set()
    declared |= {variation(case) for case in candidate.declared() if case.varied}
    found: dict[str, Finding] = {}
    tried: set[str] = set()
    unknown: dict[str, str] = {}
    unheld: dict[str, str] = {}  # extremes that a library's own functions fail too
    held = False
    compared = bool({*only} - {BOUNDS})
    for case in (case for case in cases if not case.varied):
        tried |= declared & {*PLAIN, BOUNDS}
        every = _tried(candidate, case, compared)
        for finding in every:
            known = found.setdefault(finding.check, finding)
            if known.outcome is Outcome.BLOCKED and finding.outcome is not Outcome.BLOCKED:
                found[finding.check] = finding
        if tried & set(only) <= failing(found):
            break  # each check that is asked for has failed already
        if str(case) in candidate.ended or any(ENDLESS in one.message for one in every):
            break  # the other cases would end so, too, and each of them takes seconds
    plain = plain_faults(found.values())
    asked = set(only) & set(VARIED) or not compared
    around = worked_around(candidate, plain) if asked else None
    varied = around.candidate if around else candidate
    possible = {str(case): case for case in varied.covered()} if around else {}
    for case in (case for case in cases if case.varied):
        name = variation(case)
        for_bounds = not compared and name in (LAYOUTS, UPSTREAMS) and BOUNDS not in found
        refused = name in found and found[name].rank is Rank.REFUSED  # others may be wrong
        if (name in found and not refused) or (name not in only and not for_bounds):
            continue
        tried.add(name)
        fault: Finding | None = None
        if (one := possible.get(str(case))) is not None:
            every = _tried(varied, one, compared)
            for seen in every:
                if seen.check == BOUNDS and seen.outcome is Outcome.FAILED:
                    found.setdefault(BOUNDS, seen)
            fault = next((seen for seen in every if seen.check != BOUNDS), None)
            if name == EXTREMES and (text := excused(varied, one, fault)):
                unheld[case.extreme or ""] = text
                fault = None
            elif name == EXTREMES:
                held = True
            if one.layout in TIED and fault is not None and _of_values(varied, one):
                fault = None  # `special values` is about them
            if name == LAYOUTS and fault is not None and fault.outcome is Outcome.FAILED:
                fault = replace(fault, message=fault.message + _alone(varied, one))
        if fault is not None and compared and not (refused and fault.rank is Rank.REFUSED):
            message = f"{fault.check}: {fault.message}"
            found[name] = replace(fault, check=name, message=message, special=fault.rank)
        elif not refused and (around is None or around.partly or one is None):
            already = f"fails already: {', '.join(plain)}"
            unknown[name] = (around and around.partly) or already
    first = next((case for case in possible.values() if case.layout == ALONE), None)
    if (
        LAYOUTS in only
        and LAYOUTS not in found
        and first is not None
        and (fault := _one_apart(varied, first)) is not None
    ):
        found[LAYOUTS] = fault
    if unheld:
        text = "; ".join(f"{one} is not held against it: {why}" for one, why in unheld.items())
        outcome = Outcome.PASSED if held else Outcome.UNSUPPORTED
        found.setdefault(EXTREMES, Finding(EXTREMES, outcome, message=text))
    for name, text in unknown.items():
        found.setdefault(name, Finding(name, Outcome.BLOCKED, message=text))
    if candidate.unheld and BOUNDS in tried:
        text = f"canaries alone tell of {', '.join(candidate.unheld)}: a tensor holds addresses"
        found.setdefault(BOUNDS, Finding(BOUNDS, Outcome.PASSED, message=text))
    for name in (name for name in ALL if name in only):
        if name in tried:
            yield found.get(name, Finding(name, Outcome.PASSED))
        else:
            why = "the provider covers no such case" if name in declared else NONE[name]
            yield Finding(name, Outcome.UNSUPPORTED, message=why)


def plain_faults(findings: Iterable[Finding]) -> list[str]:
    """The checks of plain cases that do not hold, but for what was not tried behind another one."""
    bad = {one.check: one.outcome for one in findings if not one.outcome.good}
    own = {OUTPUTS} if OUTPUTS in bad else {GRADIENTS}  # what the interpreter refuses is blocked
    return [
        name for name in PLAIN if name in bad and (name in own or bad[name] is not Outcome.BLOCKED)
    ]


@dataclass(frozen=True)
class Around:
    """A candidate whose faults in plain cases are worked around. partly: why a check that holds of
    it need not hold of the candidate; empty where it does."""

    candidate: Candidate
    partly: str = ""


def worked_around(candidate: Candidate, plain: Collection[str]) -> Around | None:
    """Copies are given to one that changes what it gets; gradients that it does not give are not
    asked for, and none at all where others are wrong. None where outputs are wrong.

    plain: as `plain_faults` names them.
    """
    key = tuple(plain)
    if key not in candidate.around:
        candidate.around[key] = _worked_around(candidate, plain)
    return candidate.around[key]


def _worked_around(candidate: Candidate, plain: Collection[str]) -> Around | None:
    if {OUTPUTS, UNWRITTEN} & set(plain):
        return None
    if TOUCHED in plain:
        candidate = candidate.shielded()
    if GRADIENTS not in plain:
        return Around(candidate)
    if (less := _of_given_gradients(candidate)) is not None:
        return Around(less)
    return Around(candidate.forward_only(), "fails already: gradients; outputs alone hold")


def _of_given_gradients(candidate: Candidate) -> Candidate | None:
    """Of which only those gradients are asked that it gives; None where that is no way around."""
    inputs = candidate.inputs(candidate.smallest())
    try:
        given = candidate.results(inputs, PoisonedMemory(), GuardedMemory())
    except Exception:
        return None
    lacking = [name for name in candidate.op.differentiable if f"grad {name}" not in given]
    less = candidate.without_gradients(lacking)
    every = (one for case in less.plain() for one in faults(less, case))
    return less if lacking and all(one.check != GRADIENTS for one in every) else None


def _tried(candidate: Candidate, case: OpCase, compared: bool) -> list[Finding]:
    """The faults of a case; of one in which a process ended before, only that."""
    if (text := candidate.ended.get(str(case))) is None:
        return list(faults(candidate, case, compared=compared))
    ended = Finding(OUTPUTS, Outcome.CRASHED, str(case), text, special=Rank.WRONG)
    return [ended, *_behind(candidate, case, ended)]


def _alone(candidate: Candidate, case: OpCase) -> str:
    """Which inputs alone make a case wrong by their layout, in words; "" where none does."""
    enough = []
    plain = replace(case, layout="contiguous").inputs(candidate.device, candidate.seed)
    laid_out = case.inputs(candidate.device, candidate.seed)
    for name, value in laid_out.args.items():
        inputs = replace(plain, args={**plain.args, name: value})
        try:
            results = candidate.results(inputs, guards=GuardedMemory())
            wrong = bool(candidate.wrong(case, results, inputs))
        except Exception:
            wrong = True
        if wrong:
            enough.append(name)
    named = " or ".join(filter(None, [", ".join(enough[:-1]), *enough[-1:]]))
    return f"; {named} alone in this layout is enough" if enough else ""


def _of_values(candidate: Candidate, case: OpCase) -> bool:
    """Whether a case is wrong by the values of its inputs, which may cancel: it is so where they
    lie densely, too, or by little. A stride that is misread gives other values altogether."""
    inputs = candidate.inputs(case)
    with contextlib.suppress(Exception):
        results = candidate.results(inputs, guards=GuardedMemory())
        slack = LITTLE * candidate.slack[case.dtype]
        if all(one.passed for one in case.judge(results, inputs, slack=slack)):
            return True
    inputs = inputs.dense()
    try:
        results = candidate.results(inputs, guards=GuardedMemory())
        return bool(candidate.wrong(case, results, inputs))
    except Exception:
        return True


def _one_apart(candidate: Candidate, case: OpCase) -> Finding | None:
    """What is wrong where one input alone has another layout, and the others are contiguous: a
    kernel may ask one input for the layout of all."""
    names = [name for name, one in candidate.op.inputs.items() if one.axes]
    for layout, name in itertools.product((ALONE, "transposed"), names if len(names) > 1 else ()):
        one = replace(case, layout=layout, alone=name)
        fault = next(faults(candidate, one), None)
        if fault is not None and fault.rank is not Rank.REFUSED:
            message = f"{fault.check}: {fault.message}; {name} alone is {layout}"
            return replace(fault, check=LAYOUTS, message=message, special=fault.rank)
    return None


def excused(candidate: Candidate, case: OpCase, fault: Finding | None) -> str | None:
    """Why a wrong result for extreme values is not held against a candidate: the reference, torch's
    own function or the independent code of the op is wrong there by the same measure, and the
    candidate's error is no larger multiple of theirs than it may be of the reference's."""
    compared = fault is not None and fault.outcome is Outcome.FAILED
    if fault is None or not compared or fault.check not in (OUTPUTS, GRADIENTS):
        return None
    op, inputs = candidate.op, case.inputs(candidate.device, candidate.seed)
    results = candidate.results(inputs, guards=GuardedMemory())
    own = _errors(candidate.wrong(case, results, inputs))
    named = [one for name, one in op.providers.items() if name in ("eager", "torch")]
    others = {one.name: one.call for one in named} | op.independents
    for name, call in others.items():
        if call is candidate.provider.call:
            continue
        try:
            wrong = candidate.wrong(case, evaluate(op, call, inputs), inputs)
        except Exception:  # it does not take such inputs, and says nothing about them
            continue
        theirs = _errors(wrong)
        if own and all(_near(error, theirs.get(where)) for where, error in own.items()):
            return f"{name} fails likewise, {wrong[0]}"
    return None


def _errors(wrong: list[Comparison]) -> dict[tuple[str, str], float]:
    """By result and norm, the errors that are too large."""
    return {
        (one.name, check.norm): check.error
        for one in wrong
        for check in one.checks
        if not check.passed
    }


def _near(error: float, other: float | None) -> bool:
    return other is not None and (math.isnan(other) or error <= SLACK * other)


def failing(found: dict[str, Finding]) -> set[str]:
    """The checks that were tried and do not hold."""
    return {name for name, one in found.items() if one.outcome is not Outcome.BLOCKED}


def first_fault(candidate: Candidate) -> Finding | None:
    """The first fault of the first case that has one; None when all cases are right."""
    return next((one for case in candidate.covered() for one in faults(candidate, case)), None)


def variation(case: OpCase) -> str:
    """The check that a varied case belongs to."""
    if case.extreme:
        return EXTREMES
    if case.layout != "contiguous":
        return LAYOUTS
    if case.upstream != "contiguous":
        return UPSTREAMS
    return ABSENT if case.absent else WANTED


def faults(
    candidate: Candidate, case: OpCase, *, refusable: bool = False, compared: bool = True
) -> Iterator[Finding]:
    """What is wrong in one case. refusable: an error by which the candidate refuses the case is a
    fault of its contract, as for a layout. compared: whether results are."""
    guards = GuardedMemory()
    ended: Exception | None = None
    wrong: list[Comparison] = []
    try:
        inputs = candidate.inputs(case)
        results = candidate.results(inputs, PoisonedMemory(), guards)
        wrong = candidate.wrong(case, results, inputs) if compared else []
    except Exception as error:
        ended = error
    if beyond := guards.broken():
        more = f", and {len(beyond) - 1} more" if len(beyond) > 1 else ""
        yield Finding(BOUNDS, Outcome.FAILED, str(case), beyond[0] + more)
    if ended is not None:
        refusable |= variation(case) in (LAYOUTS, UPSTREAMS) and case.varied
        first = _ended_by(candidate, case, ended, refusable)
        if isinstance(ended, ChangedInputError) and first.check == TOUCHED:
            passes = {False: ended.forward, True: ended.backward}
            each = [guards.launched(backward=one) for one, changed in passes.items() if changed]
            if kernels := ", ".join(dict.fromkeys(filter(None, each))):
                first = replace(first, message=f"{first.message}; kernels: {kernels}")
        if first.special is Rank.REFUSED and candidate.provider.contiguous and case.layout in OTHER:
            return  # refused, as declared
        if not (beyond and first.check == TOUCHED):  # what was changed are the canaries around it
            yield first
        yield from _behind(candidate, case, first)
        return
    if compared and any(value.isnan().any() for value in results.values()):
        again = candidate.results(inputs, PoisonedMemory(clean=True), GuardedMemory())
        gone = {name: one.isnan() & ~again[name].isnan() for name, one in results.items()}
        if unwritten := {name: places for name, places in gone.items() if places.any()}:
            where = ", ".join(f"{name} ({_places(one)})" for name, one in unwritten.items())
            text = f"never written, or read before: {where}"
            if kernels := guards.launched(backward=all(map(is_gradient, unwritten))):
                text += f"; kernels: {kernels}"
            yield Finding(UNWRITTEN, Outcome.FAILED, str(case), text)
            wrong = candidate.wrong(case, again, inputs)
    for check in (OUTPUTS, GRADIENTS):
        texts = [str(one) for one in wrong if is_gradient(one.name) == (check == GRADIENTS)]
        if texts:
            if kernels := guards.launched(backward=check == GRADIENTS):
                texts.append(f"kernels: {kernels}")
            yield Finding(check, Outcome.FAILED, str(case), "; ".join(texts))


def _ended_by(candidate: Candidate, case: OpCase, error: Exception, refusable: bool) -> Finding:
    """The fault that an error of a call is."""
    of_gradients = isinstance(error, GradientError) or in_backward(error)
    check = GRADIENTS if of_gradients and candidate.op.differentiable else OUTPUTS
    if raised_by_another(error, candidate):
        return crashed(check, error, candidate, case)
    if isinstance(error, ChangedInputError):
        return Finding(TOUCHED, Outcome.FAILED, str(case), str(error))
    if isinstance(error, ContractError):
        finding = Finding(check, Outcome.FAILED, str(case), f"{place(error)}{error}")
    else:
        finding = crashed(check, error, candidate, case)
    if refusable and refuses(error) and not isinstance(error, ContractError):
        return replace(finding, special=Rank.REFUSED)
    return finding


def _behind(candidate: Candidate, case: OpCase, first: Finding) -> Iterator[Finding]:
    """What else is wrong in a case that a first fault ended, and what cannot be known there."""
    if first.check == TOUCHED:
        yield from faults(candidate.shielded(), case)
        return
    unknown = [UNWRITTEN, TOUCHED, BOUNDS]
    if first.check == GRADIENTS:
        forward = candidate.forward_only()
        yield from faults(forward, replace(case, op=forward.op))
    elif candidate.op.differentiable:
        unknown.append(GRADIENTS)
    for check in unknown:
        text = f"not compared, since {first.check} ended the call: {first.message}"
        yield Finding(check, Outcome.BLOCKED, first.case, text)


def _places(bad: torch.Tensor) -> str:
    first = bad.nonzero()[0].tolist() if bad.dim() else []
    return f"{int(bad.sum())} of {bad.numel()} elements, the first at {first}"
