"""Every check that an implementation of an op must pass, by name, and how to run them.

    candidate = Candidate(op, op["triton"], torch.device("cuda"))
    for finding in run(candidate):
        print(finding.check, finding.outcome.value, finding.case, finding.message)

A finding names the case in which a check failed, and what was seen. A check that cannot be made
does not pass: it is UNSUPPORTED, with the reason.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

from tinyllama.harness.check import (
    accuracy,
    calls,
    compiling,
    configurations,
    frameworks,
    large,
    programs,
    reference,
    sizes,
    special,
)
from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.crash import crashed, raised_by_another
from tinyllama.harness.check.evaluate import ContractError, is_gradient
from tinyllama.harness.check.finding import (
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
# These ask about the memory that a call is given, or cannot copy it.
_OF_ITS_OWN_MEMORY = {"fresh contents", "compiled", "captured", "side stream", "large offsets"}


def run(
    candidate: Candidate,
    only: Collection[str] = CHECKS,
    *,
    plain: Collection[str] = (),
    bounded: bool = True,
) -> Iterator[Finding]:
    """The findings of the checks named in ``only``, in the order of `CHECKS`.

    plain: the checks of plain cases that fail, as far as ``only`` does not test that. What they
        found is worked around (`accuracy.worked_around`).
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
        found = list(accuracy.check(candidate, only))
        plain = accuracy.plain_faults(found)
        bounded = bounded and all(one.outcome.good for one in found if one.check == accuracy.BOUNDS)
        yield from (_of_reference(one, candidate) for one in found)
    if not set(only) <= set(accuracy.ALL):  # later, since a first call may be wrong
        candidate = candidate.with_kernels()
    for name in (*_OTHERS, *_COMPARING):
        if name in only:
            bounds = Bounds()
            with candidate.limits(bounds):
                finding = _behind(name, candidate, plain) if plain else _finding(name, candidate)
            finding = _with_kernels(finding, bounds.kernels)
            yield _with_out_of_bounds(finding, bounds.out_of_bounds) if bounded else finding
            bounded = bounded and not bounds.out_of_bounds


def _of_reference(finding: Finding, candidate: Candidate) -> Finding:
    """Where the candidate is the reference and agrees with itself: what else speaks against it."""
    name, eager = finding.check, candidate.provider.name == "eager"
    if not eager or not finding.outcome.good or name not in (accuracy.OUTPUTS, accuracy.GRADIENTS):
        return finding
    cases = [case for case in candidate.covered() if case.layout == case.upstream]
    for case in cases:
        for result, text in reference.faults(case, candidate.seed):
            if is_gradient(result) is (name == accuracy.GRADIENTS):
                return Finding(name, Outcome.FAILED, str(case), text)
    if name == accuracy.OUTPUTS and (text := reference.narrow(cases[0], candidate.seed)):
        return Finding(name, Outcome.FAILED, str(cases[0]), text, special=Rank.WARNING)
    return finding


def _behind(name: str, candidate: Candidate, plain: Collection[str]) -> Finding:
    """What a check finds behind the faults of plain cases.

    One that compares with the reference's results is asked about the candidate with these worked
    around. Another one is asked about the candidate itself; what is not there behind them follows
    from them.
    """
    around = accuracy.worked_around(candidate, plain)
    if name in _OTHERS:
        finding = _finding(name, candidate)
        if finding.outcome.good or around is None or name == "resources":
            return finding
        again = _finding(name, around.candidate)
        if again.outcome is Outcome.FAILED:
            return again
        if not around.partly:
            return replace(finding, cause=" and ".join(plain)) if again.outcome.good else finding
        if finding.outcome is Outcome.CRASHED and again.outcome is Outcome.PASSED:
            return Finding(name, Outcome.BLOCKED, message=around.partly)
        return finding
    if around is None:
        text = f"fails already: {', '.join(plain)}"
    elif accuracy.TOUCHED in plain and name in _OF_ITS_OWN_MEMORY:
        if (finding := _finding(name, candidate)).outcome is Outcome.UNSUPPORTED:
            return finding
        text = f"fails already: {accuracy.TOUCHED}; copies of them would hide what is asked"
    else:
        finding = _finding(name, around.candidate)
        if finding.outcome is not Outcome.PASSED or not around.partly:
            return finding
        text = around.partly
    return Finding(name, Outcome.BLOCKED, message=text)


def _with_kernels(finding: Finding, kernels: Mapping[str, str]) -> Finding:
    """A fault with the kernels that were launched, each with its line, where it names none."""
    if finding.outcome is not Outcome.FAILED or any(name in finding.message for name in kernels):
        return finding
    named = ", ".join(f"{name} ({place})" for name, place in kernels.items())
    return replace(finding, message=f"{finding.message}; kernels: {named}") if named else finding


def _with_out_of_bounds(finding: Finding, out_of_bounds: list[str]) -> Finding:
    """What was accessed out of bounds comes before what else was seen."""
    if not out_of_bounds:
        return finding
    if finding.outcome.good:
        text = f"out of bounds: {out_of_bounds[0]}"
        return Finding(finding.check, Outcome.FAILED, finding.case, text, special=Rank.UNSAFE)
    return replace(finding, message=f"out of bounds: {out_of_bounds[0]}; then: {finding.message}")


def _finding(name: str, candidate: Candidate) -> Finding:
    last: OpCase | None = None

    def announce(case: OpCase) -> None:
        nonlocal last
        last = case
        candidate.announce(case)

    try:
        problem = {**_OTHERS, **_COMPARING}[name](replace(candidate, announce=announce))
    except Unsupported as reason:
        return Finding(name, Outcome.UNSUPPORTED, message=str(reason))
    except ContractError as error:
        if raised_by_another(error, candidate):
            return crashed(name, error, candidate, last)
        return Finding(name, Outcome.FAILED, str(last or ""), str(error))
    except Exception as error:
        return crashed(name, error, candidate, last)
    if isinstance(problem, Finding):
        return problem
    if problem is None or isinstance(problem, str):
        return Finding(name, Outcome.PASSED, message=problem or "")
    case, message, *rank = problem
    return Finding(name, Outcome.FAILED, str(case), message, special=next(iter(rank), None))
