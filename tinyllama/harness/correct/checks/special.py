"""Values that random ones never are: all negative, zero, equal to each other, far apart, tiny,
infinite, NaN; one of them in one place, or one row; and parameters that are not the default ones.

They are asked of inputs for which an op declares no distribution of its own, so that any value may
come. Integers and booleans are all one value, the least or the largest that is drawn. Right is what
the reference gives, or torch's provider, or independent code. At ties, and at zero, a gradient is a
convention: another one than these is advice, but for a NaN, and where the reference's does not
jump. It is also advice if a NaN in an input does not reach an output, or reaches an output
that does not depend on it. It is a fault if a boolean output that reports infinities fails to
report a NaN.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tinyllama.harness.correct.cases import OpCase, elements
from tinyllama.harness.correct.checks.blocks import (
    Change,
    changed_in,
    half_a_row,
    half_left_out,
    in_blocks,
    in_states,
)
from tinyllama.harness.correct.checks.crash import raised_by_another, refuses
from tinyllama.harness.correct.checks.differing import RefusedError, cancels, differs, wrong_nan
from tinyllama.harness.correct.checks.finding import (
    Candidate,
    Problem,
    Rank,
    Unsupported,
    others,
)
from tinyllama.harness.correct.checks.graph import same_bits
from tinyllama.harness.correct.checks.memory import passed_on
from tinyllama.harness.correct.checks.settings import of_several
from tinyllama.harness.correct.checks.sizes import (
    draws_for,
    general,
)
from tinyllama.harness.correct.checks.thresholds import compared_with
from tinyllama.harness.correct.evaluate import ContractError, Inputs, evaluate, is_gradient
from tinyllama.harness.declare.autograd import several
from tinyllama.harness.declare.specs import FLOATS, STANDARD

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
# Of these kinds, results are not compared where the reference has lost its digits.
SENSITIVE = ("tiniest", "shifted", "shifted far down", "shifted far up")
# Kinds that are tried in other dtypes, too: sums of float16 overflow, and a small number that is
# added is zero; numbers of bfloat16 are beyond the range of float16.
OF_RANGE = {
    torch.float16: ("far apart", "shifted", "all zero"),
    torch.bfloat16: ("huge", "tiny"),
}
INFINITIES = (float("inf"), float("-inf"))
CASES = 4  # the general one and the smallest others: extremes beside what fills no block
OF_BLOCKS = ("all negative", "with ties")  # kinds that are tried in a later block of a row, too
CONVENTIONAL = ("all zero", "with ties")  # there functions such as a maximum have no gradient
EVENLY, WIDEST = "evenly spaced", 16  # up to this value of either sign
NUDGE = 1e-7  # by which inputs are moved to see whether a gradient jumps
JUMP = 0.1  # of a gradient and the usual one: the least that is a jump
CHANCE = 8  # equal values, expected in one draw, that are too many for none to be there by chance
LARGEST = 100.0  # a bound, such as an epsilon, that each row reaches
MOST_WHOLE = 1025  # for a parameter that is a whole number: more may take too long
BEYOND = 97  # added to a parameter that is a whole number: a shift, or a window, beyond an axis


def special_values(candidate: Candidate) -> Problem | str:
    """Results are the reference's on such values, where others agree with it, and with other
    numbers for each parameter, as far as a result depends on it; zero is one of them. The text says
    what the reference does not take.

    Raises Unsupported where no input may have any value, and no parameter another one.
    """
    case = general(candidate)
    plain = candidate.inputs(case)
    names = [
        name
        for name, one in candidate.op.inputs.items()
        if one.values is STANDARD
        and not (one.many or one.mutated)
        and one.dtype in (None, *FLOATS, torch.float64)
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
    placed = itertools.chain(_in_places(candidate, case, names), in_states(candidate, case))
    if not (names or numbered or given_settings or any(placed) or any(_arranged(candidate, case))):
        raise Unsupported("no input may have any value, and no parameter another one")
    for (one, name, value), row in itertools.product(numbered, (False, True)):
        filled: Change = partial(_of_first_row if row else torch.full_like, fill_value=value)
        alike = changed_in(candidate.inputs(one), [name], filled)
        with contextlib.suppress(RefusedError):
            seen = differs(candidate, one, alike, refusable=True)
            if said := seen[1] if seen is not None else passed_on(candidate, alike):
                return one, f"{name} all {value}{' in its first row' * row}: {said}"
    for what, arranged in () if candidate.op.mutated else _arranged(candidate, case):
        with contextlib.suppress(RefusedError):
            if (seen := differs(candidate, case, arranged, refusable=True)) is not None:
                return case, f"{what}: {seen[1]}"
    advice = None
    every = [case, *(one for one in of_dtype if str(one) != str(case))][:CASES]
    kinds = list(itertools.product(every, KINDS, [names])) if names else []
    if len(names) > 1:
        kinds += [(case, kind, [name]) for kind in LARGE for name in names]
    for dtype, of_dtype_kinds in OF_RANGE.items() if names else ():
        if (largest := _largest_in(candidate, dtype)) is not None:
            kinds += [(largest, kind, names) for kind in of_dtype_kinds]
    refused: dict[str, None] = {}
    noted = partial(_noted, candidate, refused)
    for one, kind, of in kinds:
        change, what = KINDS[kind], f"{' and '.join(of)} {kind}"
        usual = candidate.inputs(one)
        changed = changed_in(usual, of, change)
        with noted(what):
            if kind in SENSITIVE and cancels(candidate, one, changed):
                continue
            # Of several inputs, terms may be products of two.
            times = LARGE.get(kind, 1) ** min(2, len(of))
            seen = differs(candidate, one, changed, usual=usual, times=times)
            if seen is None:
                continue
            name, text = seen
            if kind not in CONVENTIONAL or not _is_convention(candidate, changed, name):
                return one, f"{what}: {text}"
            text = f"{what}, the gradient is not the reference's: {text}"
            advice = advice or (one, text, Rank.ADVICE)
    for what, changed, times in _in_places(candidate, case, names):
        with noted(what):
            if times > 1 and cancels(candidate, case, changed):
                continue
            seen = differs(candidate, case, changed, usual=plain, times=times)
            if seen is not None and not _is_convention(candidate, changed, seen[0]):
                return case, f"{what}: {seen[1]}"
    kept = {kind: KINDS[kind] for kind in OF_BLOCKS} | {EVENLY: _evenly}
    for what, long, changed in in_blocks(candidate, case, names, kept):
        times = WIDEST if what.endswith(EVENLY) else 1
        with noted(what):
            seen = differs(candidate, long, changed, usual=candidate.inputs(long), times=times)
            if seen is not None and not _is_convention(candidate, changed, seen[0]):
                return long, f"{what}: {seen[1]}"
    for what, changed in in_states(candidate, case):
        with noted(what):
            if (seen := differs(candidate, case, changed)) is not None:
                return case, f"{what}: {seen[1]}"
    for given in given_settings:
        changed = replace(plain, params={**plain.params, **given})
        named = ", ".join(f"{parameter} = {value!r}" for parameter, value in given.items())
        with noted(named):
            try:
                seen = differs(candidate, case, changed)
            except Exception as error:
                # Not every whole number need be a setting that a candidate has, nor every two.
                may = len(given) > 1 or any(type(value) is int for value in given.values())
                if not may or not refuses(error) or isinstance(error, ContractError):
                    raise
                continue
            said = seen[1] if seen is not None else passed_on(candidate, changed)
            if said:
                return case, f"{named}: {said}"
    for parameter in [
        name for name, value in plain.params.items() if type(value) is float and value
    ]:
        if (wrong := _zero(candidate, case, parameter, names)) is not None:
            return case, f"{parameter} = 0.0: {wrong}"
        for other in (1.0, 2, FAR * plain.params[parameter], LARGEST, -plain.params[parameter]):
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
    for parameter, value in plain.params.items():
        for other in _beside(candidate, parameter, value):
            if (wrong := _other(candidate, case, parameter, other, names)) is not None:
                return case, f"{parameter} = {other!r}: {wrong}"
    for name, value in itertools.product(names, INFINITIES):
        for where, put in (("in", having), ("in the first row of", _of_first_row)):
            infinite = changed_in(plain, [name], partial(put, fill_value=value))
            with noted(f"{value} {where} {name}"):
                if lost := wrong_nan(candidate, case, infinite, of_nan=False):
                    return case, f"{value} {where} {name}: {lost}"
    for what, infinite, right in _unused(candidate, case, names):
        with noted(what):
            results = candidate.forward_only().results(infinite)
            own = (n for n, one in right.items() if (results[n].isnan() & ~one.isnan()).any())
            if reached := ", ".join(own):
                return case, f"{what}: a NaN reaches {reached}"
    for name in names:
        with noted(f"half a row of -inf in {name}"):
            if (found := half_a_row(candidate, case, name)) is not None:
                return found
    for name in dict.fromkeys(name for _, name, value in numbered if value is False):
        if (found := half_left_out(candidate, case, name)) is not None:
            return found
    for name in names:
        with noted(f"a NaN in {name}"):
            if flag := _untold(candidate, plain, name):
                return case, f"{flag} tells of an infinity in {name}, and not of a NaN"
            given_nan = changed_in(plain, [name], partial(having, fill_value=math.nan))
            if advice is None and (lost := wrong_nan(candidate, case, given_nan)):
                advice = case, f"a NaN in {name} {lost}", Rank.ADVICE
    return advice or (f"not with {'; '.join(refused)}" if refused else None)


def _beside(candidate: Candidate, parameter: str, value: Any) -> list[Any]:
    """Values at, below and beyond the numbers that the candidate compares a parameter with: there
    its code takes another branch."""
    if type(value) is float:
        numbers = compared_with(candidate.provider.call, parameter)
        return [float(one * factor) for one in numbers for factor in (1, 0.5, 2)]
    if type(value) is int:
        numbers = compared_with(candidate.provider.call, parameter)
        near = (int(one) + step for one in numbers for step in (0, -1, 1))
        return [one for one in dict.fromkeys(near) if 0 < one <= MOST_WHOLE]
    return []


@contextlib.contextmanager
def _noted(candidate: Candidate, refused: dict[str, None], what: str) -> Iterator[None]:
    """Meanwhile, what the reference raises is noted with these inputs, and suppressed."""
    try:
        yield
    except Exception as error:
        if not (by := raised_by_another(error, candidate)):
            raise
        text = str(error).partition(chr(10))[0]
        refused[f"{what}, of which {by} raised an error: {type(error).__name__}: {text}"] = None


def _untold(candidate: Candidate, plain: Inputs, name: str) -> str | None:
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
        untold = torch.stack([one[flag] != own[flag] for one in known]).all(0)
        if (tells & untold).any():
            return flag
    return None


def _largest_in(candidate: Candidate, dtype: torch.dtype) -> OpCase | None:
    """The case in which a sum is the first to overflow; None where this dtype was tried already."""
    if dtype not in candidate.dtypes or candidate.dtypes[0] is dtype:
        return None
    cases = [one for one in candidate.plain() if one.dtype is dtype]
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
        draws = [one.flatten().long() for one in draws_for(candidate, case, name)]
        drawn = torch.cat(draws)
        if not (_distinct(draws) or all(torch.equal(one, one.sort().values) for one in draws)):
            each = drawn.min(), drawn.clamp(min=0).min(), drawn.max()
            yield from ((name, one) for one in dict.fromkeys(int(value) for value in each))


def _distinct(draws: list[torch.Tensor]) -> bool:
    """Whether all values of a draw differ, and not by chance: values of different draws are the
    same so often that some within one would be, too."""
    if any(one.unique().numel() < one.numel() for one in draws):
        return False
    times = torch.cat(draws).unique(return_counts=True)[1]
    pairs = int((times * (times - 1) // 2).sum())
    return not pairs or pairs > CHANCE * len(draws)


def _arranged(candidate: Candidate, case: OpCase) -> Iterator[tuple[str, Inputs]]:
    """Yields a description and inputs, for each vector of integers that need not be in order: in
    order, and in order but for those between its ends. Of indices, both ends may be where they
    are if nothing is moved, and what lies between them not."""
    plain = candidate.inputs(case)
    for name, declared in candidate.op.inputs.items():
        value = plain.args[name]
        whole = not (declared.many or value.is_floating_point() or value.dtype is torch.bool)
        if not whole or value.dim() != 1 or value.numel() <= 3:
            continue
        draws = draws_for(candidate, case, name)
        orders = ([one.sort(descending=down).values for one in draws] for down in (False, True))
        if any(all(map(torch.equal, draws, each)) for each in orders):
            continue
        ordered = value.sort().values
        between = torch.cat((ordered[:1], ordered[1:-1].flip(0), ordered[-1:]))
        for what, one in (("in order", ordered), ("in order but between its ends", between)):
            yield f"{name} {what}", replace(plain, args={**plain.args, name: one})


def _unused(
    candidate: Candidate, case: OpCase, names: list[str]
) -> Iterator[tuple[str, Inputs, dict[str, torch.Tensor]]]:
    """Yields a description, inputs and the reference's outputs, for an op with a mask, lengths or
    indices: each element on which no output of the reference depends is infinite, as what is left
    in padding may be."""
    plain, op, forward = candidate.inputs(case), candidate.op, candidate.forward_only().op
    if op.mutated or all(one.floating for one in op.inputs.values()):
        return
    call = op["eager"].call
    for name in names:
        moved = changed_in(plain, [name], lambda x: (3 * x + 1).requires_grad_())
        with contextlib.suppress(Exception):  # the reference has no gradient
            outputs = several(call(*moved.args.values(), **moved.params))
            total = [one.double().square().sum() for one in outputs if one.requires_grad]
            (found,) = torch.autograd.grad(total, moved.args[name])
            change: Change = partial(torch.masked_fill, mask=found == 0, value=math.inf)
            infinite = changed_in(plain, [name], change)
            usual, right = (evaluate(forward, call, one) for one in (plain, infinite))
            if not found.all() and all(same_bits(one, usual[n]) for n, one in right.items()):
                yield f"infinite elements of {name} on which no output depends", infinite, right


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


def _evenly(x: torch.Tensor) -> torch.Tensor:
    """Evenly spaced values in the order of those of x: so close, and so wide, are random ones
    nowhere."""
    flat = x.flatten()
    places = flat.argsort().argsort()
    values = torch.linspace(-WIDEST, WIDEST, flat.numel(), dtype=torch.float64, device=x.device)
    return values.to(x.dtype)[places].view(x.shape)


def _having_each(x: torch.Tensor, values: list[float]) -> torch.Tensor:
    changed = x.clone()
    flat = changed.view(-1)[x.numel() // 2 :]
    flat[: len(values)] = torch.tensor(values, dtype=x.dtype, device=x.device)[: len(flat)]
    return changed


def _in_places(
    candidate: Candidate, case: OpCase, names: list[str]
) -> Iterator[tuple[str, Inputs, int]]:
    """Yields a description, inputs and a factor. The inputs have elements that equal a parameter or
    its opposite. Or one of them has a zero, where its distribution allows it; is all zero while the
    others are not; or has the values of another one. The inputs are treated as so many times as
    large as the usual ones."""
    plain = candidate.inputs(case)
    floating = {
        name: value
        for name, value in plain.args.items()
        if not candidate.op.inputs[name].mutated
        and isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.numel()
    }
    wide = torch.float32
    numbers = [float(one) for one in plain.params.values() if type(one) in (int, float)]
    exact = [one for one in numbers if one and torch.tensor(one, dtype=wide).item() == one]
    if exact and names:
        both = [value * sign for value in dict.fromkeys(exact) for sign in (1, -1)]
        having_each = changed_in(plain, names, partial(_having_each, values=both))
        yield f"{' and '.join(names)} with the values of parameters", having_each, 1
    for name in floating:
        declared = candidate.op.inputs[name].distribution(case.case.dims)
        least = (case.case.values.get(name) or declared).least
        if least is not None and least <= 0:
            zero = changed_in(plain, [name], partial(having, fill_value=0.0))
            yield f"a zero in {name}", zero, 1
    for name in names if len(floating) > 1 else ():
        yield f"{name} all zero", changed_in(plain, [name], torch.zeros_like), 1
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
    if op.misfit(case.case.dims, {**usual.params, parameter: 0.0}) is not None:
        return None
    for kind, times in (("", 1), ("tiny", 1), ("far apart", FAR)):
        inputs = changed_in(usual, names, KINDS[kind]) if kind else usual
        changed = replace(inputs, params={**inputs.params, parameter: 0.0})
        given: dict[str, Any] = {"usual": usual, "times": times, "refusable": True}
        try:
            seen = differs(candidate, case, changed, **given)
        except Exception as error:
            if isinstance(error, RefusedError) or refuses(error):
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
    if op.misfit(case.case.dims, given) is not None:
        return None
    changed = replace(usual, params=given)
    far = replace(changed_in(usual, names, KINDS["far apart"]), params=given)
    try:
        seen = differs(candidate, case, changed, refusable=True)
        if seen is None and type(other) is float and other < 0:
            more: dict[str, Any] = {"usual": changed, "times": FAR}
            seen = differs(candidate, case, far, refusable=True, **more)
        return seen[1] if seen is not None else passed_on(candidate, changed)
    except Exception as error:
        one = type(other) is float and other == 1
        if isinstance(error, RefusedError) or (refuses(error) and not one):
            return None
        raise
