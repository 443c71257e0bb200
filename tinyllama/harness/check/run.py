"""Every check that an implementation of an op must pass, by name, and how to run them.

    candidate = Candidate(op, op["triton"], torch.device("cuda"))
    for finding in run(candidate):
        print(finding.check, finding.outcome.value, finding.case, finding.message)

A finding names the case in which a check failed, and what was seen. A check that cannot be made
does not pass: it is UNSUPPORTED, with the reason.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from tinyllama.harness.check import (
    accuracy,
    configurations,
    frameworks,
    histories,
    programs,
    reference,
)
from tinyllama.harness.check.candidate import Candidate, Problem, Unsupported
from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.crash import crashed, raised_by_another
from tinyllama.harness.check.evaluate import ContractError, is_gradient
from tinyllama.harness.check.finding import Finding, Outcome, Rank
from tinyllama.harness.check.names import BOUNDS, GRADIENTS, OUTPUTS, PLAIN
from tinyllama.harness.kernels.bounds import Bounds
from tinyllama.harness.kernels.precision import SHORT

__all__ = ["CHECKS", "Candidate", "Finding", "Outcome", "Rank", "run"]

# The answer of a check; a text says how far a check that passed could be made.
Check = Callable[[Candidate], Problem | Finding | str]

# These say something where plain results are wrong, too; all others compare with the reference.
_OF_ANY_RESULTS: dict[str, Check] = {
    "races": programs.races,
    "second derivative": frameworks.second_derivative,
    "determinism": histories.determinism,
    "resources": configurations.resources,
}
_CHECKS: dict[str, Check] = {
    **{name: accuracy.check_varied(name) for name in accuracy.VARIED},
    **_OF_ANY_RESULTS,
    "scaled upstream": accuracy.search("scaled upstream"),
    "fresh contents": histories.fresh_contents,
    "backward twice": histories.backward_twice,
    "autocast": frameworks.autocast,
    "compiled": frameworks.compiled,
    "captured": frameworks.captured,
    "side stream": frameworks.side_stream,
    "empty batch": accuracy.search("empty batch"),
    "configurations": configurations.configurations,
    "sizes": accuracy.search("sizes"),
    "special values": accuracy.search("special values"),
    "program order": programs.program_order,
    "large offsets": programs.large_offsets,
}
CHECKS = (*PLAIN, *_CHECKS)


def run(
    candidate: Candidate, only: Collection[str] = CHECKS, earlier: Iterable[Finding] = ()
) -> Iterator[Finding]:
    """The findings of the checks named in ``only``, in the order of `CHECKS`.

    earlier: those of checks that were made before. Where plain cases fail, or could be tried in no
        dtype, checks that compare with the reference are BLOCKED; else they leave out the dtypes in
        which a plain case could not be tried. A first access out of bounds is a fault of the check
        in which it is seen.
    Raises ValueError for a name that is no check.
    """
    for name in only:
        if name not in CHECKS:
            raise ValueError(f"no check {name!r}: use some of {', '.join(CHECKS)}")
    if reason := candidate.missing():
        yield from (Finding(name, Outcome.UNSUPPORTED, message=reason) for name in only)
        return
    earlier = list(earlier)
    if set(only) & set(PLAIN):
        findings = list(accuracy.check_plain(candidate, only))
        earlier += findings
        yield from (_of_reference(finding, candidate) for finding in findings)
    if set(only) & set(_CHECKS):  # later, since a first call may be wrong
        candidate = _without_untried(candidate.with_kernels(), earlier)
    obstacle = accuracy.plain_obstacle(earlier)
    bounded = all(f.outcome.good for f in earlier if f.check == BOUNDS)
    for name in (name for name in _CHECKS if name in only):
        if obstacle and name not in _OF_ANY_RESULTS:
            yield Finding(name, Outcome.BLOCKED, message=obstacle)
            continue
        bounds = Bounds()
        with candidate.limits(bounds):
            finding = _finding(name, candidate)
        finding = _with_kernels(finding, bounds.kernels)
        yield _with_out_of_bounds(finding, bounds.out_of_bounds) if bounded else finding
        bounded = bounded and not bounds.out_of_bounds


def _without_untried(candidate: Candidate, earlier: Iterable[Finding]) -> Candidate:
    """The candidate in the dtypes in which all plain cases could be tried, if there are any."""
    untried = {name for finding in earlier for name in finding.untried.split(", ")}
    dtypes = tuple(dtype for dtype in candidate.dtypes if SHORT[dtype] not in untried)
    if not dtypes or len(dtypes) == len(candidate.dtypes):
        return candidate
    return replace(candidate, provider=replace(candidate.provider, dtypes=dtypes))


def _of_reference(finding: Finding, candidate: Candidate) -> Finding:
    """Where the candidate is the reference and agrees with itself: what else speaks against it."""
    name, eager = finding.check, candidate.provider.name == "eager"
    if not eager or not finding.outcome.good or name not in (OUTPUTS, GRADIENTS):
        return finding
    cases = [case for case in candidate.covered() if case.layout == case.upstream]
    for case in cases:
        for result, text in reference.faults(case, candidate.seed):
            if is_gradient(result) is (name == GRADIENTS):
                return Finding(name, Outcome.FAILED, str(case), text)
    if name == OUTPUTS and (text := reference.narrow(cases[0], candidate.seed)):
        return Finding(name, Outcome.FAILED, str(cases[0]), text, special=Rank.WARNING)
    return finding


def _with_kernels(finding: Finding, kernels: Mapping[str, str]) -> Finding:
    """A fault with the kernels that were launched, each with its line, where it names none."""
    if finding.outcome is not Outcome.FAILED or any(name in finding.message for name in kernels):
        return finding
    names = ", ".join(f"{name} ({place})" for name, place in kernels.items())
    return replace(finding, message=f"{finding.message}; kernels: {names}") if names else finding


def _with_out_of_bounds(finding: Finding, out_of_bounds: list[str]) -> Finding:
    """What was accessed out of bounds comes before what else was seen."""
    if not out_of_bounds or out_of_bounds[0] in finding.message:
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
        answer = _CHECKS[name](replace(candidate, announce=announce))
    except Unsupported as reason:
        return Finding(name, Outcome.UNSUPPORTED, message=str(reason))
    except ContractError as error:
        if raised_by_another(error, candidate):
            return crashed(name, error, candidate, last)
        return Finding(name, Outcome.FAILED, str(last or ""), str(error))
    except Exception as error:
        return crashed(name, error, candidate, last)
    if isinstance(answer, Finding):
        return answer
    if answer is None or isinstance(answer, str):
        return Finding(name, Outcome.PASSED, message=answer or "")
    case, message, *rank = answer
    return Finding(name, Outcome.FAILED, str(case), message, special=next(iter(rank), None))
