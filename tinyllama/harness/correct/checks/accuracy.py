"""Results on every case that follows from the declaration, each fault under its own name.

All run on poisoned memory and are held to the reference (`tinyllama.harness.correct.compare`).
Variations of the inputs are tried where the plain cases are right: one fault is not named six
times.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from tinyllama.harness.correct.cases import OpCase
from tinyllama.harness.correct.checks.finding import Candidate, Finding, Outcome
from tinyllama.harness.correct.poison import PoisonedMemory

# In the order in which they are tried: a later one presumes that the earlier ones pass.
OUTPUTS, GRADIENTS = "outputs", "gradients"
UNWRITTEN, TOUCHED = "unwritten memory", "untouched inputs"
EXTREMES, LAYOUTS, UPSTREAMS = "extreme values", "input layouts", "gradient layouts"
ABSENT = "absent gradients"
PLAIN = (OUTPUTS, GRADIENTS, UNWRITTEN, TOUCHED)
VARIED = (EXTREMES, LAYOUTS, UPSTREAMS, ABSENT)
NAMES = (*PLAIN, *VARIED)


def check(candidate: Candidate, only: Collection[str] = NAMES) -> Iterator[Finding]:
    """A finding for each of these `NAMES`; one of which the op has no case says so."""
    found: dict[str, Finding] = {}
    tried: set[str] = set()
    cases = candidate.covered()
    for case in (case for case in cases if not case.varied):
        tried |= {OUTPUTS, UNWRITTEN, TOUCHED}
        tried |= {GRADIENTS} if candidate.op.differentiable else set()
        for finding in _look(candidate, case):
            found.setdefault(finding.check, finding)
        if tried & set(only) <= set(found):
            break  # nothing that is asked for is left to be found
    blocked = next((found[name] for name in PLAIN if name in found), None)
    for case in (case for case in cases if case.varied):
        name = variation(case)
        if name in found or name not in only:
            continue
        tried.add(name)
        if blocked is not None:
            text = f"the plain cases fail already: {blocked.check}"
            found[name] = Finding(name, Outcome.BLOCKED, message=text)
            continue
        seen = next(_look(candidate, case), None)
        if seen is not None:
            found[name] = Finding(name, seen.outcome, seen.case, f"{seen.check}: {seen.message}")
    none = "the provider covers no such case of the op"
    for name in (name for name in NAMES if name in only):
        if name in tried:
            yield found.get(name, Finding(name, Outcome.PASSED))
        else:
            yield Finding(name, Outcome.UNSUPPORTED, message=none)


def first(candidate: Candidate) -> Finding | None:
    """What the first case shows that shows anything; None when all are right."""
    found = (finding for case in candidate.covered() for finding in _look(candidate, case))
    return next(found, None)


def variation(case: OpCase) -> str:
    """The check that a varied case belongs to."""
    if case.extreme:
        return EXTREMES
    if case.layout != "contiguous":
        return LAYOUTS
    return UPSTREAMS if case.upstream != "contiguous" else ABSENT


def _look(candidate: Candidate, case: OpCase) -> Iterator[Finding]:
    """What is wrong in one case."""
    inputs = candidate.inputs(case)
    try:
        results = candidate.results(inputs, PoisonedMemory())
        wrong = candidate.wrong(case, results, inputs)
    except AssertionError as error:
        name = TOUCHED if "changed" in str(error) else _named(str(error))
        yield Finding(name, Outcome.FAILED, str(case), str(error))
        return
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        yield Finding(OUTPUTS, Outcome.CRASHED, str(case), text.partition("\n")[0])
        return
    lost = [one.name for one in wrong if results[one.name].isnan().any()]
    if lost:
        again = candidate.results(inputs, PoisonedMemory(clean=True))
        if not any(again[name].isnan().any() for name in lost):
            where = ", ".join(f"{name} ({_places(results[name])})" for name in lost)
            text = f"never written, or read before: {where}"
            yield Finding(UNWRITTEN, Outcome.FAILED, str(case), text)
            return
    for name in (OUTPUTS, GRADIENTS):
        some = [str(one) for one in wrong if _named(one.name) == name]
        if some:
            yield Finding(name, Outcome.FAILED, str(case), "; ".join(some))


def _named(text: str) -> str:
    return GRADIENTS if "grad" in text or "detached" in text else OUTPUTS


def _places(result: torch.Tensor) -> str:
    bad = result.isnan()
    first = bad.nonzero()[0].tolist() if result.dim() else []
    return f"{int(bad.sum())} of {result.numel()} elements, the first at {first}"
