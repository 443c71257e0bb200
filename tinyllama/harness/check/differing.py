"""How results on unusual inputs differ from those of the reference and of others, in words."""

import contextlib
import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from tinyllama.harness.check.cases import WIDER, OpCase, References
from tinyllama.harness.check.compare import near
from tinyllama.harness.check.evaluate import Inputs, Raised, copied, evaluate, is_gradient
from tinyllama.harness.check.finding import Candidate, leaves, others
from tinyllama.harness.check.guards import GuardedMemory
from tinyllama.harness.check.poison import PoisonedMemory
from tinyllama.harness.check.unusual import INFINITIES, changed_in, having
from tinyllama.harness.declare.autograd import several
from tinyllama.harness.declare.specs import Terms

INDICES = (torch.int32, torch.int64)
MOST_ERROR = 1e-3  # of a result: where the reference's own is larger, it has lost its digits
HALF_ERROR = 1e-2  # the same in float16, which rounds by 5e-4
NUDGE = 1e-7  # by which inputs are moved to see whether a gradient jumps
JUMP = 0.1  # of a gradient and the usual one: the least that is a jump


class RefusedError(Exception):
    """The reference does not take these inputs."""


def cancels(case: OpCase, inputs: Inputs) -> bool:
    """Whether the reference itself has lost its digits there."""
    return not has_digits(case, inputs, MOST_ERROR)


def has_digits(case: OpCase, inputs: Inputs, most: float = HALF_ERROR) -> bool:
    """Whether the reference's results in the case's dtype are those in float64, up to a share."""
    found = case.references(inputs, draws=0)
    return all(near(found.eager[name], exact, most) for name, exact in found.oracle.items())


def differs(
    candidate: Candidate,
    case: OpCase,
    inputs: Inputs,
    *,
    refusable: bool = False,
    usual: Inputs | None = None,
    times: int = 1,
) -> tuple[str, str] | None:
    """The first result that is neither the reference's nor that of others, outputs first, and in
    words. refusable: raises RefusedError if the reference raises an error. times: so many times
    as large as the usual inputs these are."""
    try:
        found = case.references(inputs, draws=0)  # nothing is moved by a rounding, see below
    except Exception as error:
        if refusable:
            raise RefusedError from error
        raise
    known = (*found.oracle.values(), *found.eager.values())
    if not all(value.double().isfinite().all() for value in known):
        return None
    if usual is not None and times > 1:
        found = _of_large_terms(candidate, found, usual, times)
    guards, slack = GuardedMemory(), WIDER * candidate.slack[case.dtype]
    results = candidate.results(inputs, PoisonedMemory(), guards)
    exact = [found.oracle, *_of_float32(candidate, inputs), *others(candidate, inputs.double())]
    own: dict[str, str] = {}
    for place, oracle in enumerate(exact):
        # Not moved by a rounding, which would break ties.
        references = replace(found, oracle=oracle, perturbed=[oracle])
        if place:
            references = replace(references, eager=oracle)
        judged = case.judge(results, inputs, slack=slack, references=references)
        wrong = {one.name: str(one) for one in judged if not one.passed}
        own = {name: text for name, text in own.items() if name in wrong} if place else wrong
    for name, text in own.items():
        kernels = guards.launched(backward=is_gradient(name))
        return name, f"{text}; kernels: {kernels}" if kernels else text
    return None


def _of_large_terms(
    candidate: Candidate, found: References, usual: Inputs, times: int
) -> References:
    """References that allow for what cancels where inputs are so many times as large as usual: of
    softmax as exp(x - logsumexp), each result keeps the rounding, in float32, of a difference that
    large. So each is held to that many times its usual size, whatever its own size is."""
    plain = evaluate(candidate.op, candidate.op["eager"].call, usual.double())
    terms = dict(found.magnitudes)
    for name, oracle in found.oracle.items():
        size = times * plain[name].double().square().mean().sqrt().item()
        large = torch.full_like(oracle, size, dtype=torch.float64)
        terms[name] = torch.maximum(terms[name], large) if name in terms else large
    rounded = found.terms if found.magnitudes else Terms(torch.float32, shared=True)
    return replace(found, magnitudes=terms, terms=rounded)


def _of_float32(candidate: Candidate, inputs: Inputs) -> Iterator[dict[str, torch.Tensor]]:
    """Results of the reference for parameters as a kernel receives them, rounded to float32: then
    1 - 0.999 is another number."""
    params = {
        name: torch.tensor(value, dtype=torch.float32).item() if isinstance(value, float) else value
        for name, value in inputs.params.items()
    }
    if params != inputs.params:
        given = replace(inputs, params=params).double()
        with contextlib.suppress(Exception):  # it takes those that are not rounded
            yield evaluate(candidate.op, candidate.op["eager"].call, given)


def wrong_nan(
    candidate: Candidate, case: OpCase, inputs: Inputs, *, of_nan: bool = True
) -> str | None:
    """What is wrong with NaNs, in words. of_nan: the inputs hold a NaN, which must reach the
    outputs; else they hold an infinity. Then a NaN that no other has is wrong, in gradients too,
    and so is an output that is finite where that of all others is infinite. Where the reference's
    gradient is a NaN, torch's functions of a softmax disagree: there gradients are not compared,
    and an infinite output of the reference may be a NaN; so may the result of several calls in
    place. A boolean output must equal
    that of at least one other implementation; with a NaN in the inputs, so must one of indices."""
    undefined = not of_nan and _has_nan_gradient(candidate, inputs)
    candidate = candidate.forward_only() if of_nan or undefined else candidate
    op, guards = candidate.op, GuardedMemory()
    known = [evaluate(op, op["eager"].call, inputs), *others(candidate, inputs)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of numpy, which interprets: NaN is meant
        results = candidate.results(inputs, None, guards)
    for name, value in results.items():
        value = value.double() if value.is_floating_point() else value
        every = torch.stack([one[name].to(value.dtype) for one in known if name in one])
        each = every.isnan()
        lost, spread = each.all(0) & ~value.isnan(), value.isnan() & ~each.any(0)
        if undefined or op.calls > 1:  # a second call meets an infinity of the first: inf - inf
            spread &= ~known[0][name].isinf()
        infinite = every.isinf().all(0)
        finite = infinite & value.isfinite() & (not is_gradient(name))
        # What a NaN is as an integer of few bits is not defined; those of many are indices.
        asked = value.dtype is torch.bool or (of_nan and value.dtype in INDICES)
        unlike = (every != value).all(0) & asked
        if value.dtype is torch.int64 and not of_nan:  # where no element is the largest
            least, most = every.min(), every.max()
            widest = max(max(one.shape, default=0) for one in leaves(inputs.args))
            if least >= 0 and most < widest and bool(((value < 0) | (value >= widest)).any()):
                return f"{name} has an index beyond each axis"
        for places, what in (
            (lost & of_nan, "does not reach"),
            (spread, "reaches" if of_nan else "a NaN reaches"),
            (finite & (not of_nan), "no infinity reaches"),
            (unlike, "leads to other values than any other implementation gives in"),
        ):
            if places.any():
                first = places.nonzero()[0].tolist()
                text = f"{what} {int(places.sum())} elements of {name}, the first at {first}"
                kernels = guards.launched(backward=is_gradient(name))
                return f"{text}; kernels: {kernels}" if kernels else text
    return None


def _has_nan_gradient(candidate: Candidate, inputs: Inputs) -> bool:
    """Whether the reference gives a NaN as gradient, which no candidate need be asked for. It looks
    at the inputs that are declared to have one; if none is, at all for which it gives one."""
    if candidate.op.mutated:
        return False
    op, args = candidate.op, {name: copied(value) for name, value in inputs.args.items()}
    tensors = [one for one in args.values() if isinstance(one, torch.Tensor)]
    floating = [one for one in tensors if one.is_floating_point()]
    try:
        with Raised.in_call(op, op["eager"].call):
            declared = [args[name] for name in op.differentiable]
            wanted = [value.requires_grad_() for value in declared or floating]
            outputs = several(op["eager"].call(*args.values(), **inputs.params))
            given = [one for one in outputs if one.requires_grad]
            ones = [torch.ones_like(one) for one in given]
            found = torch.autograd.grad(given, wanted, ones, allow_unused=True) if given else ()
    except Exception:
        if op.differentiable:
            raise
        return False
    return any(one is not None and bool(one.isnan().any()) for one in found)


def untold(candidate: Candidate, plain: Inputs, name: str) -> str | None:
    """The boolean output, if any, that reports each value of an input that is not finite in every
    other implementation, and does not report a NaN in the candidate."""
    op = candidate.op
    flags = [flag for flag, one in op.outputs.items() if one.dtype is torch.bool]
    if not flags:
        return None
    kinds = (*INFINITIES, math.nan)
    each = [changed_in(plain, [name], partial(having, fill_value=value)) for value in kinds]
    usual, *right = (evaluate(op, op["eager"].call, one) for one in (plain, *each))
    own = candidate.results(each[-1])
    known = [right[-1], *others(candidate, each[-1])]
    for flag in flags:
        tells = torch.stack([one[flag] != usual[flag] for one in right]).all(0)
        silent = torch.stack([one[flag] != own[flag] for one in known]).all(0)
        if (tells & silent).any():
            return flag
    return None


def is_convention(candidate: Candidate, inputs: Inputs, name: str) -> bool:
    """Whether what differs is a gradient, finite, and differs only where that of the reference
    jumps: where it is another one if inputs are moved by a little."""
    if not is_gradient(name):
        return False
    own = candidate.results(inputs).get(name)
    exact, call = inputs.double(), candidate.op["eager"].call
    right = evaluate(candidate.op, call, exact)[name]
    known = [one[name] for one in others(candidate, inputs) if name in one]
    if own is None or (~own.isfinite() & _all_finite(right, *known)).any():
        return False
    steady = torch.ones_like(right, dtype=torch.bool)
    least = JUMP * (right.abs() + right.abs().mean())
    made = torch.Generator(right.device).manual_seed(candidate.seed)
    for _ in range(2):
        steps = {
            n: NUDGE * torch.randn(x.shape, generator=made, dtype=x.dtype, device=x.device)
            for n, x in exact.args.items()
            if isinstance(x, torch.Tensor) and x.is_floating_point()
        }
        for sign in (1, -1):
            args = {n: x + sign * steps[n] if n in steps else x for n, x in exact.args.items()}
            moved = evaluate(candidate.op, call, replace(exact, args=args))[name]
            steady &= (moved - right).abs() <= least
    return not (steady & ((own.double() - right).abs() > least)).any()


def _all_finite(*results: torch.Tensor) -> torch.Tensor:
    return torch.stack([one.isfinite() for one in results]).all(0)
