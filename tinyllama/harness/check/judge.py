"""One run of a case, and what is wrong with it as it is declared.

A case runs on memory that is filled with NaN and lies between canaries; results are within the
measured tolerance (`compare`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.crash import crashed, in_backward, place, raised_by_another
from tinyllama.harness.check.evaluate import (
    ChangedInputError,
    ContractError,
    GradientError,
    Inputs,
    is_gradient,
)
from tinyllama.harness.check.finding import Candidate, Finding, Outcome
from tinyllama.harness.check.guards import GuardedMemory
from tinyllama.harness.check.poison import PoisonedMemory

OUTPUTS, GRADIENTS = "outputs", "gradients"
UNWRITTEN, TOUCHED, BOUNDS = "unwritten memory", "untouched inputs", "out of bounds"
ENDLESS = "EndlessLoopError"  # of `tinyllama.harness.kernels.interpreter`, which needs triton


@dataclass
class Run:
    """One call of a candidate: its results, or the error that ended it; and its memory."""

    guards: GuardedMemory
    results: dict[str, torch.Tensor]
    error: Exception | None = None

    @property
    def out_of_bounds(self) -> list[str]:
        return self.guards.broken()


def run_case(candidate: Candidate, inputs: Inputs) -> Run:
    guards = GuardedMemory()
    try:
        return Run(guards, candidate.results(inputs, PoisonedMemory(), guards))
    except Exception as error:
        return Run(guards, {}, error)


def faults(candidate: Candidate, case: OpCase) -> Iterator[Finding]:
    """What is wrong in one case, each fault under the check that is about it."""
    try:
        inputs = candidate.inputs(case)
    except Exception as error:
        yield crashed(OUTPUTS, error, candidate, case)
        return
    run = run_case(candidate, inputs)
    if beyond := run.out_of_bounds:
        more = f", and {len(beyond) - 1} more" if len(beyond) > 1 else ""
        yield Finding(BOUNDS, Outcome.FAILED, str(case), beyond[0] + more)
    if run.error is not None:
        first = error_finding(candidate, case, run.error)
        if first.check == TOUCHED and isinstance(run.error, ChangedInputError):
            kernels = run.guards.launched(backward=not run.error.forward)
            first = replace(first, message=f"{first.message}{kernels}")
        if not (beyond and first.check == TOUCHED):  # what was changed are the canaries around it
            yield first
        if first.check == GRADIENTS and case.wanted is None:  # the outputs may be wrong, too
            of_outputs = faults(candidate, replace(case, wanted=()))
            yield from (finding for finding in of_outputs if finding.check == OUTPUTS)
        return
    try:
        results = run.results
        if (unwritten := _unwritten(candidate, case, inputs, run)) is not None:
            finding, results = unwritten
            yield finding
        wrong = candidate.wrong(case, results, inputs)
    except Exception as error:
        yield error_finding(candidate, case, error)
        return
    for check in (OUTPUTS, GRADIENTS):
        texts = [str(c) for c in wrong if is_gradient(c.name) == (check == GRADIENTS)]
        if texts:
            kernels = run.guards.launched(backward=check == GRADIENTS)
            yield Finding(check, Outcome.FAILED, str(case), "; ".join(texts) + kernels)


def _unwritten(
    candidate: Candidate, case: OpCase, inputs: Inputs, run: Run
) -> tuple[Finding, dict[str, torch.Tensor]] | None:
    """A finding where a NaN is gone on memory of zeros, and the results there."""
    if not any(value.isnan().any() for value in run.results.values()):
        return None
    again = candidate.results(inputs, PoisonedMemory(clean=True), GuardedMemory())
    gone = {name: x.isnan() & ~again[name].isnan() for name, x in run.results.items()}
    unwritten = {name: elements for name, elements in gone.items() if elements.any()}
    if not unwritten:
        return None
    where = ", ".join(f"{name} ({_places(x)})" for name, x in unwritten.items())
    kernels = run.guards.launched(backward=all(map(is_gradient, unwritten)))
    text = f"never written, or read before: {where}{kernels}"
    return Finding(UNWRITTEN, Outcome.FAILED, str(case), text), again


def error_finding(candidate: Candidate, case: OpCase, error: Exception) -> Finding:
    """The fault that an error of a call is: a refusal, unless a declaration is not fulfilled."""
    of_gradients = isinstance(error, GradientError) or in_backward(error)
    check = GRADIENTS if of_gradients and candidate.op.differentiable else OUTPUTS
    if raised_by_another(error, candidate):
        return crashed(check, error, candidate, case)
    if isinstance(error, ChangedInputError):
        return Finding(TOUCHED, Outcome.FAILED, str(case), str(error))
    if isinstance(error, ContractError):
        return Finding(check, Outcome.FAILED, str(case), f"{place(error)}{error}")
    return crashed(check, error, candidate, case)


def _places(bad: torch.Tensor) -> str:
    first = bad.nonzero()[0].tolist() if bad.dim() else []
    return f"{int(bad.sum())} of {bad.numel()} elements, the first at {first}"
