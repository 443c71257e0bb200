"""Every check that an implementation of an op must pass, by name, and how to run them.

    candidate = Candidate(op, op["triton"], torch.device("cuda"))
    for finding in run(candidate):
        print(finding.check, finding.outcome.value, finding.case, finding.message)

A finding names the case in which a check failed, and what was seen. A check that cannot be made
does not pass: it is UNSUPPORTED, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

from tinyllama.harness.correct.checks import (
    accuracy,
    calls,
    compiling,
    configurations,
    frameworks,
    large,
    programs,
    sizes,
    special,
)
from tinyllama.harness.correct.checks.crash import crashed
from tinyllama.harness.correct.checks.finding import (
    Candidate,
    Finding,
    Outcome,
    Problem,
    Rank,
    Unsupported,
)
from tinyllama.harness.kernels.bounds import Bounds

__all__ = ["CHECKS", "Candidate", "Finding", "Outcome", "Rank", "run"]

# What was found; a text says how far a check that passed could be made.
Check = Callable[[Candidate], Problem | Finding | str]

# These compare results with the reference's, and say nothing where plain results are wrong already.
_COMPARING: dict[str, Check] = {
    "fresh contents": calls.fresh_contents,
    "autocast": frameworks.autocast,
    "compiled": frameworks.compiled,
    "captured": frameworks.captured,
    "side stream": frameworks.side_stream,
    "empty batch": frameworks.empty_batch,
    "configurations": configurations.configurations,
    "sizes": sizes.sizes,
    "special values": special.special_values,
    "program order": programs.program_order,
    "large offsets": large.large_offsets,
}
_OTHERS: dict[str, Check] = {
    "races": programs.races,
    "scaled upstream": calls.scaled_upstream,
    "backward twice": calls.backward_twice,
    "two consumers": calls.two_consumers,
    "second derivative": calls.second_derivative,
    "determinism": calls.determinism,
    "resources": compiling.resources,
}
CHECKS = (*accuracy.ALL, *_OTHERS, *_COMPARING)


def run(
    candidate: Candidate,
    only: Collection[str] = CHECKS,
    *,
    right: bool = True,
    bounded: bool = True,
) -> Iterator[Finding]:
    """The findings of the checks named in ``only``, in the order of `CHECKS`.

    right: whether the candidate's plain results are right, as far as ``only`` does not test that.
    bounded: likewise, whether no access out of bounds was seen. A first one is a fault of the check
        in which it is seen.
    Raises ValueError for a name that is no check.
    """
    for name in only:
        if name not in CHECKS:
            raise ValueError(f"no check {name!r}: use some of {', '.join(CHECKS)}")
    if reason := candidate.missing():
        yield from (Finding(name, Outcome.UNSUPPORTED, message=reason) for name in only)
        return
    if set(only) & set(accuracy.ALL):
        for finding in accuracy.check(candidate, only):
            right = right and (finding.outcome.good or finding.check not in accuracy.PLAIN)
            bounded = bounded and (finding.outcome.good or finding.check != accuracy.BOUNDS)
            yield finding
    for name, check in {**_OTHERS, **_COMPARING}.items():
        if name in only:
            if not right and name in _COMPARING:
                yield Finding(name, Outcome.BLOCKED, message="the plain cases fail already")
            else:
                bounds = Bounds()
                with candidate.limits(bounds):
                    finding = _finding(name, check, candidate)
                finding = _with_kernels(finding, bounds.kernels)
                yield _with_strays(finding, bounds.strays) if bounded else finding
                bounded = bounded and not bounds.strays


def _with_kernels(finding: Finding, kernels: Mapping[str, str]) -> Finding:
    """A fault with the kernels that were launched, each with its line, where it names none."""
    if finding.outcome is not Outcome.FAILED or any(name in finding.message for name in kernels):
        return finding
    named = ", ".join(f"{name} ({place})" for name, place in kernels.items())
    return replace(finding, message=f"{finding.message}; kernels: {named}") if named else finding


def _with_strays(finding: Finding, strays: list[str]) -> Finding:
    """What was accessed out of bounds comes before what else was seen."""
    if not strays:
        return finding
    if finding.outcome.good:
        text = f"out of bounds: {strays[0]}"
        return Finding(finding.check, Outcome.FAILED, finding.case, text, special=Rank.UNSAFE)
    return replace(finding, message=f"out of bounds: {strays[0]}; then: {finding.message}")


def _finding(name: str, check: Check, candidate: Candidate) -> Finding:
    try:
        problem = check(candidate)
    except Unsupported as reason:
        return Finding(name, Outcome.UNSUPPORTED, message=str(reason))
    except AssertionError as error:
        return Finding(name, Outcome.FAILED, message=str(error))
    except Exception as error:
        return crashed(name, error, candidate)
    if isinstance(problem, Finding):
        return problem
    if problem is None or isinstance(problem, str):
        return Finding(name, Outcome.PASSED, message=problem or "")
    case, message, *rank = problem
    return Finding(name, Outcome.FAILED, str(case), message, special=next(iter(rank), None))
