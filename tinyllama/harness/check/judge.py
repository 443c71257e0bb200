"""One run of a case, and what is wrong with it.

`faults` judges a case as it is declared: on memory that is filled with NaN and lies between
canaries, results within the measured tolerance (`compare`). `boundary_fault` judges a point that
nobody declared. There more is granted: wider sums, inputs that move by a rounding, terms that are
as large as the inputs are, and whatever another known implementation gives or misses likewise.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from tinyllama.harness.check.cases import WIDER, OpCase, References
from tinyllama.harness.check.compare import Comparison
from tinyllama.harness.check.crash import crashed, in_backward, place, raised_by_another, refuses
from tinyllama.harness.check.evaluate import (
    ChangedInputError,
    ContractError,
    GradientError,
    Inputs,
    copied,
    evaluate,
    is_gradient,
)
from tinyllama.harness.check.finding import Candidate, Finding, Outcome, Rank, leaves, others
from tinyllama.harness.check.guards import GuardedMemory
from tinyllama.harness.check.points import Point, inputs_of, times_as_large
from tinyllama.harness.check.poison import PoisonedMemory
from tinyllama.harness.declare.autograd import several
from tinyllama.harness.declare.specs import Terms

OUTPUTS, GRADIENTS = "outputs", "gradients"
UNWRITTEN, TOUCHED, BOUNDS = "unwritten memory", "untouched inputs", "out of bounds"
ENDLESS = "EndlessLoopError"  # of `tinyllama.harness.kernels.interpreter`, which needs triton
LONG_ROWS = 4.0  # times the usual error, of a few roundings more in 16 bits
FEW_TIES = 2.0**-10  # of the elements: so many may be rounded to the other side
ALIKE = 4.0  # times as far beyond a bound as another implementation is
NUDGE = 1e-7  # of the largest element, by which inputs are moved to see whether a gradient jumps
HUGE = 1e4
OTHER = 0.1  # of a gradient and the usual one: the least by which it is another one
JUMP = 1e-3  # the least by which it jumps
FEW = 3  # elements of an axis in which terms no longer cancel
NOTHING = 2.0**-40  # of the usual size of a result: zero, up to roundings of float64
CANCELLED = 2.0**-10  # of the usual size of a result: the most that roundings leave
FAR = 4  # times the largest declared length: beyond it a refusal is not told


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


# -- a declared case ------------------------------------------------------------------------------


def faults(candidate: Candidate, case: OpCase, *, compared: bool = True) -> Iterator[Finding]:
    """What is wrong in one case, each fault under the check that is about it. compared: whether
    results are compared, or memory alone is looked at."""
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
        if isinstance(run.error, ChangedInputError) and first.check == TOUCHED:
            passes = {False: run.error.forward, True: run.error.backward}
            each = [run.guards.launched(backward=p) for p, changed in passes.items() if changed]
            if kernels := ", ".join(dict.fromkeys(filter(None, each))):
                first = replace(first, message=f"{first.message}; kernels: {kernels}")
        if not (beyond and first.check == TOUCHED):  # what was changed are the canaries around it
            yield first
        if first.check == GRADIENTS and case.wanted is None:  # the outputs may be wrong, too
            alone = faults(candidate, replace(case, wanted=()), compared=compared)
            yield from (finding for finding in alone if finding.check == OUTPUTS)
        return
    if not compared:
        return
    try:
        wrong = candidate.wrong(case, run.results, inputs)
        results = run.results
        if (found := _unwritten(candidate, case, inputs, run)) is not None:
            unwritten, results = found
            yield unwritten
            wrong = candidate.wrong(case, results, inputs)
    except Exception as error:
        yield error_finding(candidate, case, error)
        return
    for check in (OUTPUTS, GRADIENTS):
        texts = [str(c) for c in wrong if is_gradient(c.name) == (check == GRADIENTS)]
        if texts:
            if kernels := run.guards.launched(backward=check == GRADIENTS):
                texts.append(f"kernels: {kernels}")
            yield Finding(check, Outcome.FAILED, str(case), "; ".join(texts))


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
    text = f"never written, or read before: {where}"
    if kernels := run.guards.launched(backward=all(map(is_gradient, unwritten))):
        text += f"; kernels: {kernels}"
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
    finding = crashed(check, error, candidate, case)
    if case.varied and refuses(error):
        return replace(finding, special=Rank.REFUSED)
    return finding


def _places(bad: torch.Tensor) -> str:
    first = bad.nonzero()[0].tolist() if bad.dim() else []
    return f"{int(bad.sum())} of {bad.numel()} elements, the first at {first}"


# -- a point that nobody declared -----------------------------------------------------------------


def boundary_fault(candidate: Candidate, point: Point) -> tuple[Finding | None, int]:
    """What is wrong at a point, if anything, and how many accesses its programs made.

    Nothing is wrong where the reference gives no result. A refusal is told up to `FAR` times the
    largest declared length, but not of a layout.
    """
    op, case = candidate.op, point.case
    if op.misfit(case.case.dims, case.case.params) is not None or case.unsupported() is not None:
        return None, 0
    try:
        inputs = inputs_of(candidate, point)
        references = case.references(inputs, draws=0)
    except Exception:  # the reference, or a distribution, does not take it
        return None, 0
    run = run_case(candidate, inputs)
    return _fault_of(candidate, point, inputs, references, run), run.guards.accesses


def _fault_of(
    candidate: Candidate, point: Point, inputs: Inputs, references: References, run: Run
) -> Finding | None:
    def finding(message: str, rank: Rank) -> Finding:
        if kernels := run.guards.launched(backward=message.startswith("grad ")):
            message += f"; kernels: {kernels}"
        message = f"{point.text}: {message}" if point.text else message
        return Finding(point.check, Outcome.FAILED, str(point.case), message, special=rank)

    if beyond := run.out_of_bounds:
        return finding(f"out of bounds: {beyond[0]}", Rank.UNSAFE)
    if run.error is not None:
        return _of_error(candidate, point, run.error)
    try:
        if wrong := _wrong_at(candidate, point, inputs, run.results, references):
            return finding("; ".join(map(str, wrong[0])), wrong[1])
    except GradientError as error:
        return finding(str(error), Rank.WRONG)
    integers = point.painted is not None and point.painted.integers
    if (point.parameter or integers) and (text := _aliased(candidate, inputs)):
        return finding(text, Rank.UNSAFE)
    return None


def _of_error(candidate: Candidate, point: Point, error: Exception) -> Finding | None:
    case = point.case
    found = error_finding(candidate, case, error)
    text = ": ".join(filter(None, (point.text, found.message)))
    if found.outcome is Outcome.BLOCKED or ENDLESS in found.message:
        return replace(found, outcome=Outcome.BLOCKED)
    if found.check == TOUCHED:
        return replace(found, check=point.check, message=f"{TOUCHED}: {text}", special=Rank.UNSAFE)
    if isinstance(error, ContractError):
        return replace(found, check=point.check, message=text, special=Rank.WRONG)
    if case.layout != "contiguous" or case.upstream != "contiguous" or _is_far(candidate, case):
        return None
    return replace(found, check=point.check, message=text, special=Rank.REFUSED)


def _is_far(candidate: Candidate, case: OpCase) -> bool:
    """Whether an axis is much longer than the op declares it."""
    for axis, size in case.case.dims.items():
        declared = [c.dims.get(axis) for c in candidate.op.cases]
        longest = max((s for s in declared if isinstance(s, int)), default=0)
        if isinstance(size, int) and longest and size > FAR * longest:
            return True
    return False


def _wrong_at(
    candidate: Candidate,
    point: Point,
    inputs: Inputs,
    results: dict[str, torch.Tensor],
    references: References,
) -> tuple[list[Comparison], Rank] | None:
    """The results that are wrong by every measure that is granted here, and how much it matters."""
    case, painted = point.case, point.painted
    slack = (LONG_ROWS if point.of_elements else WIDER) * candidate.slack[case.dtype]

    def wrong(known: References, given: dict[str, torch.Tensor]) -> dict[str, Comparison]:
        compared = case.judge(
            given, inputs, slack=slack, references=known, of_elements=point.of_elements
        )
        return {c.name: c for c in compared if not c.passed}

    usual = candidate.inputs(case) if painted else inputs
    if (times := times_as_large(usual, inputs)) > 2:
        references = _of_large_terms(candidate, references, usual, times)
    results = {
        name: _near_overflow(x, references.oracle.get(name), references.eager.get(name))
        for name, x in results.items()
    }
    # Not moved by a rounding: nearly all points end here.
    if not wrong(replace(references, perturbed=[references.oracle]), results):
        return None
    moved = case.references(inputs, draws=2)
    references = replace(moved, magnitudes=references.magnitudes, terms=references.terms)
    found = {
        name: c
        for name, c in wrong(references, results).items()
        if not _cancelled(candidate, case, name, results, references)
    }
    for known in (*others(candidate, inputs.double()), *others(candidate, inputs)):
        if found and known.keys() >= references.oracle.keys():
            as_known = replace(references, oracle=known, eager=known, perturbed=[known])
            theirs, still = wrong(references, known), wrong(as_known, results)
            found = {
                name: c
                for name, c in found.items()
                if name in still and not (name in theirs and _alike(c, theirs[name]))
            }
    if found and painted and (painted.nan or painted.infinite):
        return _of_infinities(candidate, inputs, results, references, list(found.values()))
    if not found:
        return None
    if all(_rounded_apart(results[name], references.oracle[name]) for name in found):
        return list(found.values()), Rank.WARNING
    lost = wrong(_of_large_terms(candidate, references, usual, 1.0), results) if painted else found
    conventional = (
        is_gradient(name) and _is_convention(candidate, inputs, results, name) for name in found
    )
    lesser = not found.keys() & lost.keys() or all(conventional)
    return list(found.values()), Rank.WARNING if lesser else Rank.WRONG


def _rounded_apart(result: torch.Tensor, oracle: torch.Tensor) -> bool:
    """Whether a few small integers are off by one, as where a value is rounded at a tie. An op that
    expects it declares ``off_by``."""
    if result.is_floating_point() or result.dtype in (torch.bool, torch.int64):
        return False
    off = (result.long() - oracle.long()).abs()
    return int(off.max()) <= 1 and int(off.sum()) <= max(1, FEW_TIES * off.numel())


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


def _of_infinities(
    candidate: Candidate,
    inputs: Inputs,
    results: dict[str, torch.Tensor],
    references: References,
    found: list[Comparison],
) -> tuple[list[Comparison], Rank] | None:
    """How much it matters that results differ where an input is infinite, or a NaN.

    It is a wrong result where the reference has an answer without any NaN. Where only its gradient
    has one, as that of a softmax has, outputs alone count, and a NaN may stand for an infinity.
    """
    known = references.oracle, references.eager
    has_nan = {
        gradient: any(
            bool(x.isnan().any())
            for each in known
            for name, x in each.items()
            if x.is_floating_point() and is_gradient(name) is gradient
        )
        for gradient in (False, True)
    }
    given_nan = any(x.is_floating_point() and bool(x.isnan().any()) for x in leaves(inputs.args))
    if given_nan or has_nan[False]:
        return found, Rank.WARNING
    conventional = [
        is_gradient(c.name) and _is_convention(candidate, inputs, results, c.name) for c in found
    ]
    if all(conventional):
        return found, Rank.WARNING
    if not has_nan[True] and not _gradient_has_nan(candidate, inputs):
        return found, Rank.WRONG
    found = [c for c in found if not is_gradient(c.name)]
    for c in found:
        result, right = results[c.name], references.eager[c.name]
        if not result.is_floating_point() or not (result.isnan() <= right.isinf()).all():
            return found, Rank.WRONG
    return (found, Rank.WARNING) if found else None


def _gradient_has_nan(candidate: Candidate, inputs: Inputs) -> bool:
    """Whether the reference of an op without declared gradients has one with a NaN."""
    op = candidate.op
    if op.differentiable or op.mutated:
        return False
    args = {name: copied(value) for name, value in inputs.args.items()}
    floating = [x.requires_grad_() for x in leaves(args) if x.is_floating_point()]
    try:
        outputs = [
            y for y in several(op["eager"].call(*args.values(), **inputs.params)) if y.requires_grad
        ]
        gradients = torch.autograd.grad(
            outputs, floating, [torch.ones_like(y) for y in outputs], allow_unused=True
        )
    except Exception:
        return False
    return any(g is not None and bool(g.isnan().any()) for g in gradients)


def _cancelled(
    candidate: Candidate,
    case: OpCase,
    name: str,
    results: dict[str, torch.Tensor],
    references: References,
) -> bool:
    """Whether a result is a rounding of terms that cancel to zero, as in the norm of one element or
    the gradient of a softmax whose upstream gradient is a constant: it is small beside the same
    result of the neighbouring case, of usual values and no axis of one or two elements."""
    result, oracle = results.get(name), references.oracle[name]
    if result is None or not result.is_floating_point() or not result.numel():
        return False
    sizes = {axis: FEW for axis, size in case.case.dims.items() if size in (1, 2)}
    neighbour = OpCase(case.op, case.provider, case.case.resized(**sizes), case.dtype)
    dims, params = neighbour.case.dims, neighbour.case.params
    if neighbour.unsupported() or candidate.op.misfit(dims, params):
        return False
    call = candidate.op["eager"].call
    try:
        usual = evaluate(candidate.op, call, neighbour.inputs(candidate.device).double())[name]
    except Exception:  # the reference takes no other length
        return False
    size = float(usual.square().mean().sqrt())
    share = max(CANCELLED, 8 * torch.finfo(result.dtype).eps)
    largest = float(result.double().abs().max())
    return float(oracle.abs().max()) <= NOTHING * size and largest <= share * size


def _of_large_terms(
    candidate: Candidate, references: References, usual: Inputs, times: float
) -> References:
    """References that allow for what cancels where inputs are so many times as large as usual: of
    softmax as exp(x - logsumexp), each result keeps the rounding of a difference that large."""
    plain = evaluate(candidate.op, candidate.op["eager"].call, usual.double())
    terms = dict(references.magnitudes)
    for name, oracle in references.oracle.items():
        size = times * plain[name].double().square().mean().sqrt().item()
        large = torch.full_like(oracle, size, dtype=torch.float64)
        terms[name] = torch.maximum(terms[name], large) if name in terms else large
    rounded = references.terms if references.magnitudes else Terms(torch.float32, shared=True)
    return replace(references, magnitudes=terms, terms=rounded)


def _is_convention(
    candidate: Candidate, inputs: Inputs, results: dict[str, torch.Tensor], name: str
) -> bool:
    """Whether a gradient is finite, and differs only where that of the reference jumps: where it is
    another one if inputs move by a little."""
    call = candidate.op["eager"].call
    right = evaluate(candidate.op, call, inputs.double())[name]
    # Equal infinities are ties as well: large numbers in place of them can be moved.
    exact = inputs.double().mapped(lambda x: x.nan_to_num(nan=math.nan, posinf=HUGE, neginf=-HUGE))
    gradient = results.get(name)
    if gradient is None or (~gradient.isfinite() & right.isfinite()).any():
        return False
    steady = torch.ones_like(right, dtype=torch.bool)
    size = right.abs() + right.abs().mean()
    generator = torch.Generator(right.device).manual_seed(candidate.seed)
    for _ in range(2):
        steps = {
            n: (NUDGE * (x.abs().max() or 1.0))
            * torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)
            for n, x in exact.args.items()
            if isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel()
        }
        for sign in (1, -1):
            args = {n: x + sign * steps[n] if n in steps else x for n, x in exact.args.items()}
            moved = evaluate(candidate.op, call, replace(exact, args=args))[name]
            steady &= (moved - right).abs() <= JUMP * size
    return not (steady & ((gradient.double() - right).abs() > OTHER * size)).any()


def _aliased(candidate: Candidate, inputs: Inputs) -> str:
    """Which output shares memory with an input, where the reference's does not, in words."""
    if candidate.op.mutated:
        return ""
    shared = []
    for call in (candidate.provider.call, candidate.op["eager"].call):
        args = {name: copied(value) for name, value in inputs.args.items()}
        with torch.no_grad():
            outputs = several(call(*args.values(), **inputs.params))
        storages = {
            x.untyped_storage().data_ptr(): name
            for name, value in args.items()
            for x in (value if isinstance(value, list) else [value])
            if x.numel()
        }
        pairs = zip(candidate.op.outputs, outputs, strict=False)
        shared.append({o: storages.get(x.untyped_storage().data_ptr()) for o, x in pairs})
    for output, name in shared[0].items():
        if name is not None and shared[1].get(output) is None:
            return f"{output} shares memory with {name}"
    return ""
