"""One run of a case, and what is wrong with it: of a declared case, or at a point beyond these.

A case runs on memory that is filled with NaN and lies between canaries; results are within the
measured tolerance (`compare`). More is granted at a point that nobody declared: wider sums, inputs
that move by a rounding, terms that are as large as the inputs are, and whatever another known
implementation gives or misses likewise.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from tinyllama.harness.check.candidate import (
    Candidate,
    leaves,
    other_results,
)
from tinyllama.harness.check.cases import (
    CANCELLED,
    NOTHING,
    PERTURBATIONS,
    WIDER,
    OpCase,
    References,
)
from tinyllama.harness.check.compare import Comparison
from tinyllama.harness.check.crash import crashed, in_backward, place, raised_by_another
from tinyllama.harness.check.evaluate import (
    ChangedInputError,
    ContractError,
    GradientError,
    Inputs,
    copied,
    evaluate,
    is_gradient,
)
from tinyllama.harness.check.finding import Finding, Outcome, Rank
from tinyllama.harness.check.guards import GuardedMemory, PoisonedMemory
from tinyllama.harness.check.history import Graph, sharing
from tinyllama.harness.check.names import BOUNDS, GRADIENTS, OUTPUTS, TOUCHED, UNWRITTEN
from tinyllama.harness.check.points import EMPTY, Point, rows
from tinyllama.harness.declare.specs import Terms

ENDLESS = "EndlessLoopError"  # of `tinyllama.harness.kernels.interpreter`, which needs triton
LONG_ROWS = 4.0  # times the usual error, of a few roundings more in 16 bits
FEW_TIES = 2.0**-10  # of the elements: so many may be rounded to the other side
ALIKE = 4.0  # times as far beyond a bound as another implementation is
NUDGE = 1e-7  # of the largest element, by which inputs are moved to see whether a gradient jumps
HUGE = 1e4
OTHER = 0.1  # of a gradient and the usual one: the least by which it is another one
JUMP = 1e-3  # the least by which it jumps
FEW = 3  # elements of an axis in which terms no longer cancel
SMALL = 2.0**16  # times smaller than usual are inputs whose functions round to equal numbers
FAR = 4  # times the largest declared length: beyond it a refusal is not told
Results = dict[str, torch.Tensor]


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


def boundary_fault(candidate: Candidate, point: Point) -> tuple[Finding | None, int] | None:
    """What is wrong at a point, if anything, and how many accesses its programs made. None where
    the reference gives no result, so that nothing is tried.

    A refusal is told up to `FAR` times the largest declared length, but not of a layout.
    """
    op, case = candidate.op, point.case
    if op.misfit(case.case.dims, case.case.params) is not None or case.unsupported() is not None:
        return None
    try:
        inputs = point.inputs(candidate)
        references = case.references(inputs, draws=0)
    except Exception:  # the reference, or a distribution, does not take it
        return None
    run = run_case(candidate, inputs)
    return _fault_of(candidate, point, inputs, references, run), run.guards.accesses


def _fault_of(
    candidate: Candidate, point: Point, inputs: Inputs, references: References, run: Run
) -> Finding | None:
    def finding(message: str, rank: Rank) -> Finding:
        kernels = run.guards.launched(backward=message.startswith("grad "))
        message = f"{point.text}: {message}{kernels}" if point.text else f"{message}{kernels}"
        return Finding(point.check, Outcome.FAILED, str(point.case), message, special=rank)

    if beyond := run.out_of_bounds:
        return finding(f"out of bounds: {beyond[0]}", Rank.UNSAFE)
    if run.error is not None:
        return _of_error(candidate, point, run.error)
    number = not (point.painted and (point.painted.nan or point.painted.infinite))
    answers = references.oracle.values()
    if point.parameter and number and not all(x.isfinite().all() for x in answers):
        return None  # the reference has no answer, such as 0 / 0: a kernel may define one
    try:
        if wrong := _Trial(candidate, point, inputs, run.results).wrong(references):
            return finding("; ".join(map(str, wrong[0])), wrong[1])
    except GradientError as error:
        return finding(str(error), Rank.WRONG)
    integers = point.painted is not None and point.painted.integers
    if (point.parameter or integers) and (text := _aliased(candidate, inputs)):
        return finding(text, Rank.UNSAFE)
    return None


def _of_error(candidate: Candidate, point: Point, error: Exception) -> Finding | None:
    case = point.case
    finding = error_finding(candidate, case, error)
    text = ": ".join(filter(None, (point.text, finding.message)))
    if finding.outcome is Outcome.BLOCKED or (not point.declared and ENDLESS in finding.message):
        return replace(finding, outcome=Outcome.BLOCKED)
    rank = finding.rank if point.declared else Rank.REFUSED
    if finding.check == TOUCHED:
        text, rank = f"{TOUCHED}: {text}", Rank.UNSAFE
    elif isinstance(error, ContractError):
        rank = Rank.WRONG
    elif _may_refuse(candidate, point):
        return None
    return replace(finding, check=point.check, message=text, special=rank)


def _may_refuse(candidate: Candidate, point: Point) -> bool:
    """Whether an error is no fault: of a layout that another check is about, or that the provider
    declares not to take, or where an axis is much longer than the op declares it, or one that is
    not of rows has no entry."""
    case = point.case
    if case.layout != "contiguous" or case.upstream != "contiguous":
        contiguous = candidate.provider.contiguous and case.layout != "contiguous"
        return contiguous or not point.declared
    if point.check == EMPTY:
        return _has_rows(candidate, case)
    for axis, size in case.case.dims.items():
        declared = [c.dims.get(axis) for c in candidate.op.cases]
        longest = max((s for s in declared if isinstance(s, int)), default=0)
        if isinstance(size, int) and longest and size > FAR * longest:
            return True
    return False


def _has_rows(candidate: Candidate, case: OpCase) -> bool:
    """Whether another axis than that of the rows is empty."""
    return all(case.case.dims[axis] != 0 for axis in rows(candidate) & {*case.case.dims})


def _aliased(candidate: Candidate, inputs: Inputs) -> str:
    """Which output shares memory with an input, where the reference's does not, in words."""
    if candidate.op.mutated:
        return ""
    sides = (candidate, candidate.reference)
    graphs = [Graph(side, inputs, differentiated=False) for side in sides]
    shared, of_reference = (sharing(graph.args, graph.outputs) for graph in graphs)
    outputs = (output for output in shared if output not in of_reference)
    return next((f"{output} shares memory with {shared[output]}" for output in outputs), "")


@dataclass(frozen=True)
class _Trial:
    """The results of a candidate at a point, and what is wrong with them."""

    candidate: Candidate
    point: Point
    inputs: Inputs
    results: Results

    def wrong(self, references: References) -> tuple[list[Comparison], Rank] | None:
        """The results that are wrong by every measure that is granted here, and how much it
        matters. references: with no draws."""
        candidate, painted, results = self.candidate, self.point.painted, self.results
        usual = candidate.inputs(self.point.case) if painted else self.inputs
        if (times := times_as_large(usual, self.inputs)) > 2:
            references = self._of_large_terms(references, usual, times)
        results = {
            name: _near_overflow(x, references.oracle.get(name), references.eager.get(name))
            for name, x in results.items()
        }
        # Not moved by a rounding: nearly all points end here.
        if not self._failures(results, replace(references, perturbed=[references.oracle])):
            return None
        draws = PERTURBATIONS if self.point.declared else 2
        moved = self.point.case.references(self.inputs, draws)
        references = replace(moved, magnitudes=references.magnitudes, terms=references.terms)
        failures = {
            name: comparison
            for name, comparison in self._failures(results, references).items()
            if not self._is_cancelled(name, references.oracle[name])
        }
        failures = self._unlike_others(failures, results, references)
        if not failures:
            return None
        if self._computes_nan_of_nothing(failures):
            return list(failures.values()), Rank.WARNING
        if painted and (painted.nan or painted.infinite):
            return self._of_infinities(list(failures.values()), results, references)
        if all(
            name in results and _rounded_apart(results[name], references.oracle[name], comparison)
            for name, comparison in failures.items()
        ):
            return list(failures.values()), Rank.WARNING
        lost = failures
        if painted:  # digits beside terms of the usual size
            large_terms = self._of_large_terms(references, usual, 1.0)
            lost = self._failures(results, large_terms)
        conventional = (
            is_gradient(name) and self._is_convention(name, results.get(name)) for name in failures
        )
        lesser = not failures.keys() & lost.keys() or all(conventional)
        lesser |= all(comparison.may_cancel for comparison in failures.values())
        if painted and times_as_large(self.inputs, usual) > SMALL:  # which is the largest of these?
            lesser |= not all(references.oracle[name].is_floating_point() for name in failures)
        return list(failures.values()), Rank.WARNING if lesser else Rank.WRONG

    def _computes_nan_of_nothing(self, names: Iterable[str]) -> bool:
        """Whether these results are NaN because nothing was summed, as 0 / 0 by a softmax over no
        key: another convention. Memory of zeros tells it from what is never written."""
        if self.point.check != EMPTY or not _has_rows(self.candidate, self.point.case):
            return False
        again = self.candidate.results(self.inputs, PoisonedMemory(clean=True))
        return all(name in again and bool(again[name].isnan().all()) for name in names)

    def _failures(self, results: Results, references: References) -> dict[str, Comparison]:
        case, of_elements = self.point.case, self.point.of_elements
        slack = (LONG_ROWS if of_elements else WIDER) * self.candidate.slack[case.dtype]
        comparisons = case.judge(
            results, self.inputs, slack=slack, references=references, of_elements=of_elements
        )
        failures = {c.name: c for c in comparisons if not c.passed}
        if self.point.check == EMPTY:  # what is NaN, as the mean of nothing, may be anything
            undefined = {name for name, x in references.oracle.items() if x.isnan().all()}
            failures = {name: c for name, c in failures.items() if name not in undefined}
        return failures

    def _unlike_others(
        self, failures: dict[str, Comparison], results: Results, references: References
    ) -> dict[str, Comparison]:
        """Those that no other implementation of the op has, or has by a quarter at most."""
        candidate, inputs = self.candidate, self.inputs
        for precise in (True, False) if failures else ():
            for theirs in other_results(candidate, inputs.double() if precise else inputs):
                if not theirs.keys() >= references.oracle.keys():
                    continue
                as_right = replace(references, oracle=theirs, eager=theirs, perturbed=[theirs])
                their_failures = self._failures(theirs, references)
                unlike_theirs = self._failures(results, as_right)
                failures = {
                    name: comparison
                    for name, comparison in failures.items()
                    if name in unlike_theirs
                    and not (name in their_failures and _alike(comparison, their_failures[name]))
                }
        return failures

    def _of_infinities(
        self, failures: list[Comparison], results: Results, references: References
    ) -> tuple[list[Comparison], Rank] | None:
        """How much it matters that results differ where an input is infinite, or a NaN.

        It is a wrong result where the reference has an answer without any NaN. Where only its
        gradient has one, as that of a softmax has, outputs alone count, and a NaN may stand for an
        infinity. Where it is upstream gradients, one that is finite all the same is wrong: a loss
        scale that is too large is found out by them.
        """
        if self.point.painted and self.point.painted.upstream:
            lost = [c for c in failures if results[c.name].isfinite().all()]
            rank = Rank.WARNING if self.point.painted.nan else Rank.WRONG
            return (lost, rank) if lost else None
        has_nan = {
            gradient: any(
                bool(x.isnan().any())
                for right in (references.oracle, references.eager)
                for name, x in right.items()
                if x.is_floating_point() and is_gradient(name) is gradient
            )
            for gradient in (False, True)
        }
        args = leaves(self.inputs.args)
        given_nan = any(x.is_floating_point() and bool(x.isnan().any()) for x in args)
        conventional = (
            is_gradient(c.name) and self._is_convention(c.name, results.get(c.name))
            for c in failures
        )
        meets_itself = self.candidate.op.calls > 1  # an infinity of the state, in a second call
        if given_nan or has_nan[False] or meets_itself or all(conventional):
            return failures, Rank.WARNING
        if not has_nan[True] and not self._gradient_has_nan():
            return failures, Rank.WRONG
        failures = [c for c in failures if not is_gradient(c.name)]
        for c in failures:
            result, right = results[c.name], references.eager[c.name]
            if not result.is_floating_point() or not (result.isnan() <= right.isinf()).all():
                return failures, Rank.WRONG
            if (result.isfinite() & right.isinf()).any():  # a number, where the answer is known
                return failures, Rank.WRONG
        return (failures, Rank.WARNING) if failures else None

    def _gradient_has_nan(self) -> bool:
        """Whether the reference of an op without declared gradients has one with a NaN."""
        op = self.candidate.op
        if op.differentiable or op.mutated:
            return False

        def prepare(value: Any) -> Any:
            value = copied(value)
            for tensor in leaves({"": value}):
                tensor.requires_grad_(tensor.is_floating_point())
            return value

        try:
            graph = Graph(self.candidate.reference, self.inputs, prepare=prepare)
            inputs = [x for x in leaves(graph.args) if x.requires_grad]
            totals = [y.sum() for y in graph.outputs.values() if y.requires_grad]
            gradients = torch.autograd.grad(totals, inputs, allow_unused=True)
        except Exception:
            return False
        return any(g is not None and bool(g.isnan().any()) for g in gradients)

    def _is_cancelled(self, name: str, oracle: torch.Tensor) -> bool:
        """Whether a result is a rounding of terms that cancel to zero, as in the norm of one
        element or the gradient of a softmax whose upstream gradient is a constant: it is small
        beside the same result of the neighbouring case, of usual values and no axis of one or two
        elements."""
        case, result = self.point.case, self.results.get(name)
        if result is None or not result.is_floating_point() or not result.numel():
            return False
        sizes = {axis: FEW for axis, size in case.case.dims.items() if size in (1, 2)}
        neighbour = OpCase(case.op, case.provider, case.case.resized(**sizes), case.dtype)
        misfit = self.candidate.op.misfit(neighbour.case.dims, neighbour.case.params)
        if misfit or neighbour.unsupported():
            return False
        try:
            usual = self._of_reference(neighbour.inputs(self.candidate.device).double())[name]
        except Exception:  # the reference takes no other length
            return False
        size = float(usual.square().mean().sqrt())
        share = max(CANCELLED, 8 * torch.finfo(result.dtype).eps)
        largest = float(result.double().abs().max())
        small = float(oracle.abs().max()) <= NOTHING * size and largest <= share * size
        return math.isfinite(size) and small

    def _of_large_terms(self, references: References, usual: Inputs, times: float) -> References:
        """References that allow for what cancels where inputs are so many times as large as usual:
        of softmax as exp(x - logsumexp), each result keeps the rounding of a difference that
        large."""
        plain_results = self._of_reference(usual.double())
        terms = dict(references.magnitudes)
        for name, oracle in references.oracle.items():
            size = times * plain_results[name].double().square().mean().sqrt().item()
            large = torch.full_like(oracle, size, dtype=torch.float64)
            terms[name] = torch.maximum(terms[name], large) if name in terms else large
        rounded = references.terms if references.magnitudes else Terms(torch.float32, shared=True)
        return replace(references, magnitudes=terms, terms=rounded)

    def _is_convention(self, name: str, gradient: torch.Tensor | None) -> bool:
        """Whether a gradient is finite, and differs only where that of the reference jumps: where
        it is another one if inputs move by a little."""
        exact = self.inputs.double()
        right = self._of_reference(exact)[name]
        if gradient is None or (~gradient.isfinite() & right.isfinite()).any():
            return False
        # Equal infinities are ties as well: large numbers in place of them can be moved.
        exact = exact.mapped(lambda x: x.nan_to_num(nan=math.nan, posinf=HUGE, neginf=-HUGE))
        steady = torch.ones_like(right, dtype=torch.bool)
        size = right.abs() + right.abs().mean()
        generator = torch.Generator(right.device).manual_seed(self.candidate.seed)
        for _ in range(2):
            steps = {
                n: (NUDGE * (x.abs().max() or 1.0))
                * torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)
                for n, x in exact.args.items()
                if isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel()
            }
            for sign in (1, -1):
                args = {n: x + sign * steps[n] if n in steps else x for n, x in exact.args.items()}
                moved = self._of_reference(replace(exact, args=args))[name]
                steady &= (moved - right).abs() <= JUMP * size
        return not (steady & ((gradient.double() - right).abs() > OTHER * size)).any()

    def _of_reference(self, inputs: Inputs) -> Results:
        return evaluate(self.candidate.op, self.candidate.op["eager"].call, inputs)


def _rounded_apart(result: torch.Tensor, oracle: torch.Tensor, comparison: Comparison) -> bool:
    """Whether a few small integers are off by one, as where a value is rounded at a tie. An op that
    expects it declares ``off_by``."""
    if result.is_floating_point() or result.dtype in (torch.bool, torch.int64):
        return False
    wrong = max((check.error for check in comparison.checks if not check.passed), default=0)
    off = (result.long() - oracle.long()).abs()
    return int(off.max()) <= 1 and wrong <= max(1, FEW_TIES * off.numel())


def _near_overflow(
    result: torch.Tensor, oracle: torch.Tensor | None, eager: torch.Tensor | None
) -> torch.Tensor:
    """The result, with the reference's elements where these are so near to the largest number that
    the order of a sum decides whether one is infinite."""
    if oracle is None or eager is None or not result.is_floating_point():
        return result
    limits = torch.finfo(result.dtype)
    most = limits.max / 2 if limits.max < 2**20 else limits.max * 2.0**-16
    decided = oracle.isfinite() & (oracle.abs() > most) & ~result.isnan()
    return torch.where(decided, eager.to(result.dtype), result)


def _alike(wrong: Comparison, theirs: Comparison) -> bool:
    """Whether another implementation fails in the same norms, by no less than a quarter."""
    errors = {check.norm: check.error for check in theirs.checks if not check.passed}
    return all(
        check.norm in errors
        and (math.isnan(errors[check.norm]) or check.error <= ALIKE * errors[check.norm])
        for check in wrong.checks
        if not check.passed
    )


def times_as_large(typical: Inputs, inputs: Inputs) -> float:
    """How many times as large as usual the largest of the inputs is, at least 1."""
    factors = [1.0]
    for name, value in inputs.args.items():
        before = typical.args[name]
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
            largest, largest_before = value.double().abs().max(), before.double().abs().max()
            if value.isfinite().all() and largest_before > 0:
                factors.append(float(largest / largest_before))
    return max(factor for factor in factors if not math.isnan(factor))
