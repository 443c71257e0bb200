"""Values that random ones never are: all negative, zero, equal to each other, far apart, tiny,
infinite, NaN; one of them in one place, or one row; and parameters that are not the default ones.

They are asked of inputs for which an op declares no distribution of its own, so that any value may
come. Integers and booleans are all one value, the least or the largest that is drawn. Right is what
the reference gives, or torch's provider, or independent code. At ties, and at zero, a gradient is a
convention: another one than these is advice, but for a NaN, and where the reference's does not
jump. So is a NaN that is lost, or that reaches a result which does not depend on it.
"""

import contextlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tinyllama.harness.correct.cases import OpCase, References, elements
from tinyllama.harness.correct.checks.crash import refuses
from tinyllama.harness.correct.checks.finding import (
    Candidate,
    Problem,
    Rank,
    Unsupported,
    leaves,
    others,
)
from tinyllama.harness.correct.checks.guards import GuardedMemory
from tinyllama.harness.correct.checks.memory import passed_on
from tinyllama.harness.correct.checks.settings import of_several
from tinyllama.harness.correct.checks.sizes import MOST_ELEMENTS, UNLIKE, WIDER, general, resized
from tinyllama.harness.correct.evaluate import (
    ContractError,
    Inputs,
    copied,
    evaluate,
    is_gradient,
)
from tinyllama.harness.correct.poison import PoisonedMemory
from tinyllama.harness.declare.autograd import several
from tinyllama.harness.declare.specs import STANDARD, Terms

Change = Callable[[torch.Tensor], torch.Tensor]
FAR = 64  # times as large: exponentials overflow
SHIFT = 1000  # added: a difference of squares cancels
FAR_SHIFT = 2**15  # added or subtracted: beyond 1e4, which a kernel may use as infinity
HUGE = 2**33  # times as large: beyond integers of 32 bits, and a fourth power overflows
KINDS: dict[str, Change] = {
    "all negative": lambda x: -x.abs() - 0.5,
    "all zero": torch.zeros_like,
    "with ties": lambda x: (2 * x).round() / 2,
    "far apart": lambda x: FAR * x,
    "tiny": lambda x: x * torch.finfo(x.dtype).tiny ** 0.25,
    "tiniest": lambda x: x * torch.finfo(x.dtype).tiny ** 0.5,
    "shifted": lambda x: x + SHIFT,
    "shifted far down": lambda x: x - FAR_SHIFT,
    "shifted far up": lambda x: x + FAR_SHIFT,
    "huge": lambda x: x * HUGE,
}
# So many times as large, about, inputs are.
LARGE = {"far apart": FAR, "shifted": SHIFT, "huge": HUGE}
LARGE |= dict.fromkeys(("shifted far down", "shifted far up"), FAR_SHIFT)
# Of these kinds, results are not compared where the reference's error is a larger share of them.
SENSITIVE = ("tiniest", "shifted", "shifted far down", "shifted far up")
MOST_ERROR = 1e-3
# Kinds that are tried in float16, too: its sums overflow, and a small number that is added is zero.
OF_RANGE = ("far apart", "shifted", "all zero")
INFINITIES = (float("inf"), float("-inf"))
HALVED = (2051, 259)  # lengths of a row of which half is more than a block of 1,024, or of 128
ROWS = 4  # of which one is sought that leaves no output of the reference infinite
CASES = 4  # the general one and the smallest others: extremes beside what fills no block
DRAWN = 4096  # integers, of which the least and the largest are taken
CONVENTIONAL = ("all zero", "with ties")  # there functions such as a maximum have no gradient
NUDGE = 1e-7  # by which inputs are moved to see whether a gradient jumps
JUMP = 0.1  # of a gradient and the usual one: the least that is a jump
BEYOND = 97  # added to a parameter that is a whole number: a shift, or a window, beyond an axis


def special_values(candidate: Candidate) -> Problem:
    """Results are the reference's on such values, where others agree with it, and with other
    numbers for each parameter, as far as a result depends on it; zero is one of them.

    Raises Unsupported where no input may have any value, and no parameter another one.
    """
    case = general(candidate)
    plain = candidate.inputs(case)
    names = [
        name
        for name, one in candidate.op.inputs.items()
        if one.values is STANDARD and not (one.many or one.mutated)
    ]
    of_dtype = [one for one in candidate.plain() if one.dtype is case.dtype]
    # Of each combination of parameters the general case, or else the smallest.
    each = {str(one.case.params): one for one in (*reversed(of_dtype), case)}
    numbered = [
        (one, *pair)
        for one in (() if candidate.op.mutated else each.values())
        for pair in _numbered(candidate, one)
    ]
    given_settings = list(of_several(candidate, case))
    if not (names or numbered or given_settings or any(_in_places(candidate, case, names))):
        raise Unsupported("no input may have any value, and no parameter another one")
    for (one, name, value), row in itertools.product(numbered, (False, True)):
        filled: Change = partial(_of_first_row if row else torch.full_like, fill_value=value)
        alike = _changed(candidate.inputs(one), [name], filled)
        with contextlib.suppress(_RefusedError):
            seen = _differs(candidate, one, alike, refusable=True)
            if said := seen[1] if seen is not None else passed_on(candidate, alike):
                return one, f"{name} all {value}{' in its first row' * row}: {said}"
    advice = None
    every = [case, *(one for one in of_dtype if str(one) != str(case))][:CASES]
    kinds = list(itertools.product(every, KINDS)) if names else []
    if names and (largest := _largest_in_float16(candidate)) is not None:
        kinds += [(largest, kind) for kind in OF_RANGE]
    for one, kind in kinds:
        change = KINDS[kind]
        usual = candidate.inputs(one)
        changed = _changed(usual, names, change)
        if kind in SENSITIVE and _cancels(candidate, one, changed):
            continue
        seen = _differs(candidate, one, changed, usual=usual, times=LARGE.get(kind, 1))
        if seen is None:
            continue
        name, text = seen
        what = f"{' and '.join(names)} {kind}"
        if kind not in CONVENTIONAL or not _is_convention(candidate, changed, name):
            return one, f"{what}: {text}"
        text = f"{what}, the gradient is not the reference's: {text}"
        advice = advice or (one, text, Rank.ADVICE)
    for what, changed, times in _in_places(candidate, case, names):
        if times > 1 and _cancels(candidate, case, changed):
            continue
        seen = _differs(candidate, case, changed, usual=plain, times=times)
        if seen is not None and not _is_convention(candidate, changed, seen[0]):
            return case, f"{what}: {seen[1]}"
    for given in given_settings:
        changed = replace(plain, params={**plain.params, **given})
        try:
            seen = _differs(candidate, case, changed)
        except Exception as error:
            # Not every whole number need be a setting that a candidate has, nor every two.
            may = len(given) > 1 or any(type(value) is int for value in given.values())
            if not may or not refuses(error) or isinstance(error, ContractError):
                raise
            continue
        said = seen[1] if seen is not None else passed_on(candidate, changed)
        if said:
            named = ", ".join(f"{parameter} = {value!r}" for parameter, value in given.items())
            return case, f"{named}: {said}"
    for parameter in [
        name for name, value in plain.params.items() if type(value) is float and value
    ]:
        if (wrong := _zero(candidate, case, parameter, names)) is not None:
            return case, f"{parameter} = 0.0: {wrong}"
        for other in (1.0, 2, FAR * plain.params[parameter], -plain.params[parameter]):
            if (wrong := _other(candidate, case, parameter, other, names)) is None:
                continue
            if other >= 0:
                return case, f"{parameter} = {other!r}: {wrong}"
            advice = advice or (case, f"{parameter} = {other!r}: {wrong}", Rank.ADVICE)
    for parameter, value in plain.params.items():
        for other in (0, value + BEYOND, -value) if type(value) is int and value else ():
            if (wrong := _other(candidate, case, parameter, other, names)) is None:
                continue
            if other == 0:
                return case, f"{parameter} = 0: {wrong}"
            advice = advice or (case, f"{parameter} = {other!r}: {wrong}", Rank.ADVICE)
    for name, value in itertools.product(names, INFINITIES):
        for where, put in (("in", having), ("in the first row of", _of_first_row)):
            infinite = _changed(plain, [name], partial(put, fill_value=value))
            if lost := _nan(candidate, case, infinite, of_nan=False):
                return case, f"{value} {where} {name}: {lost}"
    for name in names:
        if (found := _half_a_row(candidate, case, name)) is not None:
            return found
    for name in dict.fromkeys(name for _, name, value in numbered if value is False):
        if (found := _half_left_out(candidate, case, name)) is not None:
            return found
    for name in names:
        if advice is None and (
            lost := _nan(
                candidate, case, _changed(plain, [name], partial(having, fill_value=math.nan))
            )
        ):
            advice = case, f"a NaN in {name} {lost}", Rank.ADVICE
    return advice


def _largest_in_float16(candidate: Candidate) -> OpCase | None:
    """The case in which a sum is the first to overflow; None where float16 was tried already."""
    half = torch.float16
    if half not in candidate.dtypes or candidate.dtypes[0] is half:
        return None
    cases = [one for one in candidate.plain() if one.dtype is half]
    return max(cases, key=lambda one: elements(candidate.op, one.case), default=None)


def _numbered(candidate: Candidate, case: OpCase) -> Iterator[tuple[str, Any]]:
    """Each input of integers or booleans, with the least value that is drawn for it, the least one
    that is not negative, and the largest. Not one whose values are in order or all differ: they may
    have to."""
    inputs = candidate.inputs(case)
    for name, declared in candidate.op.inputs.items():
        value = inputs.args[name]
        if declared.many or declared.mutated or value.is_floating_point() or value.numel() < 2:
            continue
        if value.dtype is torch.bool:
            yield from ((name, False), (name, True))
            continue
        values = case.case.values.get(name) or declared.distribution(case.case.dims)
        drawn = values.sample((DRAWN,), torch.Generator().manual_seed(candidate.seed)).long()
        if drawn.unique().numel() < DRAWN and not torch.equal(drawn, drawn.sort().values):
            each = drawn.min(), drawn.clamp(min=0).min(), drawn.max()
            yield from ((name, one) for one in dict.fromkeys(int(value) for value in each))


def _changed(inputs: Inputs, names: list[str], change: Change) -> Inputs:
    args = {n: change(value) if n in names else value for n, value in inputs.args.items()}
    return replace(inputs, args=args)


def having(x: torch.Tensor, fill_value: float) -> torch.Tensor:
    """x with this value in one place."""
    changed = x.clone()
    changed.view(-1)[x.numel() // 2] = fill_value
    return changed


def _of_first_row(x: torch.Tensor, fill_value: Any) -> torch.Tensor:
    """x with this value in its first row; of a vector in its first place."""
    changed = x.clone()
    changed[:1] = fill_value
    return changed


def _in_places(
    candidate: Candidate, case: OpCase, names: list[str]
) -> Iterator[tuple[str, Inputs, int]]:
    """Inputs of which one has a zero where it may, or the values of another one; in words, and so
    many times as large as the usual ones they may be taken for."""
    plain = candidate.inputs(case)
    floating = {
        name: value
        for name, value in plain.args.items()
        if not candidate.op.inputs[name].mutated
        and isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.numel()
    }
    for name in floating:
        declared = candidate.op.inputs[name].distribution(case.case.dims)
        least = (case.case.values.get(name) or declared).least
        if least is not None and least <= 0:
            zero = _changed(plain, [name], partial(having, fill_value=0.0))
            yield f"a zero in {name}", zero, 1
    for pair in itertools.combinations(floating, 2):
        name, other = pair if pair[0] in names else reversed(pair)
        axes, others_axes = (set(candidate.op.inputs[one].axes) for one in (name, other))
        alike = others_axes <= axes or len(others_axes) == 1  # else seldom compared with each other
        if name in names and alike:
            value, source = floating[name], floating[other].flatten()
            equal = source.repeat(value.numel() // source.numel() + 1)[: value.numel()]
            given = replace(plain, args={**plain.args, name: equal.view(value.shape)})
            yield f"values of {other} in {name}", given, 2


def _is_convention(candidate: Candidate, inputs: Inputs, name: str) -> bool:
    """Whether what differs is a gradient, finite, and differs only where that of the reference
    jumps: where it is another one if inputs are moved by a little."""
    if not is_gradient(name):
        return False
    own = candidate.results(inputs).get(name)
    exact, call = inputs.double(), candidate.op["eager"].call
    right = evaluate(candidate.op, call, exact)[name]
    known = [one[name] for one in others(candidate, inputs) if name in one]
    if own is None or (~own.isfinite() & all_finite(right, *known)).any():
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


def all_finite(*results: torch.Tensor) -> torch.Tensor:
    return torch.stack([one.isfinite() for one in results]).all(0)


def _zero(candidate: Candidate, case: OpCase, parameter: str, names: list[str]) -> str | None:
    """What is wrong for a parameter of zero, which some take for none that is given; on the usual
    inputs, on tiny ones, where a small parameter is seen, and far apart, where what it is a power
    of may be zero, too. It may be refused."""
    op, usual = candidate.op, candidate.inputs(case)
    sizes = op.numbers(case.case.dims)
    if op.fits({**sizes, **usual.params, parameter: 0.0}) is not None:
        return None
    for kind, times in (("", 1), ("tiny", 1), ("far apart", FAR)):
        inputs = _changed(usual, names, KINDS[kind]) if kind else usual
        changed = replace(inputs, params={**inputs.params, parameter: 0.0})
        given: dict[str, Any] = {"usual": usual, "times": times, "refusable": True}
        try:
            seen = _differs(candidate, case, changed, **given)
        except Exception as error:
            if isinstance(error, _RefusedError) or refuses(error):
                return None
            raise
        if seen is not None:
            return seen[1]
    return None


def _other(
    candidate: Candidate, case: OpCase, parameter: str, other: Any, names: list[str]
) -> str | None:
    """What is wrong for another value of a parameter: 1.0, at which a factor makes no difference, a
    whole number, a large one, and one of the other sign, also far apart: there the largest element
    becomes the least one. Each may be refused, but for 1.0."""
    op, usual = candidate.op, candidate.inputs(case)
    given = {**usual.params, parameter: other}
    if op.fits({**op.numbers(case.case.dims), **given}) is not None:
        return None
    changed = replace(usual, params=given)
    far = replace(_changed(usual, names, KINDS["far apart"]), params=given)
    try:
        seen = _differs(candidate, case, changed, refusable=True)
        if seen is None and type(other) is float and other < 0:
            more: dict[str, Any] = {"usual": changed, "times": FAR}
            seen = _differs(candidate, case, far, refusable=True, **more)
        return seen[1] if seen is not None else passed_on(candidate, changed)
    except Exception as error:
        one = type(other) is float and other == 1
        if isinstance(error, _RefusedError) or (refuses(error) and not one):
            return None
        raise


def _half_a_row(candidate: Candidate, case: OpCase, name: str) -> Problem:
    """What is wrong where the first half of a row, more than a block, is -inf, as of what a mask
    leaves out: an output is a NaN that is one nowhere else, or differs."""
    op = candidate.op
    for axis, size in itertools.product(op.inputs[name].axes[-1:], HALVED):
        long = resized(candidate, case, axis, size)
        if long is None or elements(op, long.case) > MOST_ELEMENTS or not candidate.takes(long):
            continue
        usual = candidate.inputs(long)
        for row in range(ROWS):
            changed = _changed(usual, [name], partial(_half, row))
            known = evaluate(op, op["eager"].call, changed)
            if any(known[one].isinf().any() for one in op.outputs):
                continue
            if lost := _nan(candidate, long, changed, of_nan=False):
                return long, f"half a row of -inf in {name}: {lost}"
            results = candidate.results(changed)
            for which, right in known.items():
                if right.is_floating_point() and right.isfinite().all():
                    own = results[which].double()
                    if not (own - right.double()).norm() <= UNLIKE * right.double().norm():
                        return long, f"half a row of -inf in {name}: {which} is not the reference's"
            return None
    return None


def _half_left_out(candidate: Candidate, case: OpCase, name: str) -> Problem:
    """What is wrong where a mask leaves out the first half of a row, more than a block."""
    for axis, size in itertools.product(candidate.op.inputs[name].axes[-1:], HALVED):
        long = resized(candidate, case, axis, size)
        if long is None or elements(candidate.op, long.case) > MOST_ELEMENTS:
            continue
        changed = _changed(candidate.inputs(long), [name], partial(_half, 0, fill_value=False))
        with contextlib.suppress(_RefusedError):
            if (seen := _differs(candidate, long, changed, refusable=True)) is not None:
                return long, f"half a row of {name} is False: {seen[1]}"
            return None
    return None


def _half(row: int, x: torch.Tensor, fill_value: Any = -math.inf) -> torch.Tensor:
    changed = x.clone()
    rows = changed.view(-1, x.shape[-1])
    rows[row % len(rows), : x.shape[-1] // 2] = fill_value
    return changed


class _RefusedError(Exception):
    """The reference does not take these inputs."""


def _cancels(candidate: Candidate, case: OpCase, inputs: Inputs) -> bool:
    """Whether the reference itself has lost its digits there."""
    found = case.references(inputs, draws=0)
    return any(
        not (found.eager[name].double() - exact).norm() <= MOST_ERROR * exact.double().norm()
        for name, exact in found.oracle.items()
    )


def _differs(
    candidate: Candidate,
    case: OpCase,
    inputs: Inputs,
    *,
    refusable: bool = False,
    usual: Inputs | None = None,
    times: int = 1,
) -> tuple[str, str] | None:
    """The first result that is neither the reference's nor that of others, outputs first, and in
    words. refusable: raises _RefusedError if the reference raises an error. times: so many times
    as large as the usual inputs these are."""
    try:
        found = case.references(inputs, draws=0)  # nothing is moved by a rounding, see below
    except Exception as error:
        if refusable:
            raise _RefusedError from error
        raise
    known = (*found.oracle.values(), *found.eager.values())
    if not all(value.isfinite().all() for value in known):
        return None
    if usual is not None and times > 1:
        found = _of_large_terms(candidate, found, usual, times)
    guards, slack = GuardedMemory(), WIDER * candidate.slack[case.dtype]
    results = candidate.results(inputs, PoisonedMemory(), guards)
    exact = [found.oracle, *others(candidate, inputs.double())]
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


def _nan(candidate: Candidate, case: OpCase, inputs: Inputs, *, of_nan: bool = True) -> str | None:
    """What is wrong with NaNs, in words. of_nan: the inputs hold a NaN, which must reach the
    outputs; else they hold an infinity. Then a NaN that no other has is wrong, in gradients too,
    and so is an output that is finite where that of all others is infinite. Where the reference's
    gradient is a NaN, torch's functions of a softmax disagree: there gradients are not compared,
    and an infinite output of the reference may be a NaN."""
    undefined = not of_nan and _has_nan_gradient(candidate, inputs)
    candidate = candidate.forward_only() if of_nan or undefined else candidate
    op, guards = candidate.op, GuardedMemory()
    known = [evaluate(op, op["eager"].call, inputs), *others(candidate, inputs)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of numpy, which interprets: NaN is meant
        results = candidate.results(inputs, None, guards)
    for name, value in results.items():
        each = torch.stack([one[name].isnan() for one in known if name in one])
        lost, spread = each.all(0) & ~value.isnan(), value.isnan() & ~each.any(0)
        if undefined:
            spread &= ~known[0][name].isinf()
        infinite = torch.stack([one[name].isinf() for one in known if name in one]).all(0)
        finite = infinite & value.isfinite() & (not is_gradient(name))
        if value.dtype is torch.int64 and not of_nan:  # where no element is the largest
            least, most = (
                (of(torch.stack([one[name] for one in known if name in one])))
                for of in (torch.min, torch.max)
            )
            widest = max(max(one.shape, default=0) for one in leaves(inputs.args))
            if least >= 0 and most < widest and bool(((value < 0) | (value >= widest)).any()):
                return f"{name} has an index beyond each axis"
        for places, what in (
            (lost & of_nan, "does not reach"),
            (spread, "reaches" if of_nan else "a NaN reaches"),
            (finite & (not of_nan), "no infinity reaches"),
        ):
            if places.any():
                first = places.nonzero()[0].tolist()
                text = f"{what} {int(places.sum())} elements of {name}, the first at {first}"
                kernels = guards.launched(backward=is_gradient(name))
                return f"{text}; kernels: {kernels}" if kernels else text
    return None


def _has_nan_gradient(candidate: Candidate, inputs: Inputs) -> bool:
    """Whether the reference gives a NaN as gradient, which no candidate need be asked for."""
    if candidate.op.mutated:
        return False
    args = {name: copied(value) for name, value in inputs.args.items()}
    tensors = [value for value in args.values() if isinstance(value, torch.Tensor)]
    wanted = [value.requires_grad_() for value in tensors if value.is_floating_point()]
    outputs = several(candidate.op["eager"].call(*args.values(), **inputs.params))
    given = [one for one in outputs if one.requires_grad]
    ones = [torch.ones_like(one) for one in given]
    found = torch.autograd.grad(given, wanted, ones, allow_unused=True) if given else ()
    return any(one is not None and bool(one.isnan().any()) for one in found)
