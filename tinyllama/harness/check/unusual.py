"""Unusual inputs: the values, where in a tensor they are put, and for which inputs; and parameters
that are not the default ones. Nothing is judged here."""

import bisect
import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tinyllama.harness.check.cases import OpCase, elements
from tinyllama.harness.check.compare import same_bits
from tinyllama.harness.check.evaluate import Inputs, evaluate
from tinyllama.harness.check.finding import Candidate
from tinyllama.harness.check.resizing import draws_for
from tinyllama.harness.check.thresholds import compared_with
from tinyllama.harness.declare.autograd import several
from tinyllama.harness.declare.specs import STANDARD

Change = Callable[[torch.Tensor], torch.Tensor]
FAR = 64  # times as large: exponentials overflow
SHIFT = 1000  # added: a difference of squares cancels
FAR_SHIFT = 2**15  # added or subtracted: beyond 1e4, which a kernel may use as infinity
TAIL = 16  # added or subtracted: exp(-16) is lost when it is added to 1, but is not zero
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
TAILS: dict[str, Change] = {  # of the outputs of an op with one input: no term is a product of two
    "in the lower tail": lambda x: x - TAIL,
    "in the upper tail": lambda x: x + TAIL,
}
# So many times as large, about, inputs are.
LARGE = {"far apart": FAR, "shifted": SHIFT, "huge": HUGE}
LARGE |= dict.fromkeys(("shifted far down", "shifted far up"), FAR_SHIFT)
# Kinds that are tried in other dtypes, too: sums of float16 overflow, and a small number that is
# added is zero; numbers of bfloat16 are beyond the range of float16.
OF_RANGE = {
    torch.float16: ("far apart", "shifted", "all zero"),
    torch.bfloat16: ("huge", "tiny"),
}
INFINITIES = (float("inf"), float("-inf"))
CASES = 4  # the general one and the smallest others: extremes beside what fills no block
WIDEST = 16  # of evenly spaced values, of either sign
RANGED = 3  # inputs of which the largest values are looked for
POWERS = 16  # of two, up to the largest number of float16
CHANCE = 8  # equal values, expected in one draw, that are too many for none to be there by chance
LARGEST = 100.0  # a bound, such as an epsilon, that each row reaches
MOST_WHOLE = 1025  # for a parameter that is a whole number: more may take too long
BEYOND = 97  # added to a parameter that is a whole number: a shift, or a window, beyond an axis


def changed_in(inputs: Inputs, names: list[str], change: Change) -> Inputs:
    args = {n: change(value) if n in names else value for n, value in inputs.args.items()}
    return replace(inputs, args=args)


def may_be_zero(candidate: Candidate, case: OpCase, name: str) -> bool:
    declared = candidate.op.inputs[name]
    values = case.case.values.get(name) or declared.distribution(case.case.dims)
    return declared.floating and values.least is not None and values.least <= 0


def having(x: torch.Tensor, fill_value: float) -> torch.Tensor:
    """x with this value in one place."""
    changed = x.clone()
    changed.view(-1)[x.numel() // 2] = fill_value
    return changed


def of_first_row(x: torch.Tensor, fill_value: Any) -> torch.Tensor:
    """x with this value in its first row; of a vector in its first place."""
    changed = x.clone()
    changed[:1] = fill_value
    return changed


def evenly(x: torch.Tensor) -> torch.Tensor:
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


def in_places(
    candidate: Candidate, case: OpCase, names: list[str]
) -> Iterator[tuple[str, OpCase, Inputs, int]]:
    """Yields a description, the case, inputs and a factor. The inputs have elements that equal a
    parameter or its opposite. Or one of them has a zero, where its distribution allows it; is all
    zero while the others are not; or has the values of another one. The inputs are treated as so
    many times as large as the usual ones."""
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
        yield f"{' and '.join(names)} with the values of parameters", case, having_each, 1
    for name in floating:
        if may_be_zero(candidate, case, name):
            zero = changed_in(plain, [name], partial(having, fill_value=0.0))
            yield f"a zero in {name}", case, zero, 1
    for name in names if len(floating) > 1 else ():
        yield f"{name} all zero", case, changed_in(plain, [name], torch.zeros_like), 1
    for pair in itertools.combinations(floating, 2):
        name, other = pair if pair[0] in names else reversed(pair)
        axes, others_axes = (set(candidate.op.inputs[one].axes) for one in (name, other))
        alike = others_axes <= axes or len(others_axes) == 1  # else seldom compared with each other
        if name in names and alike:
            value, source = floating[name], floating[other].flatten()
            equal = source.repeat(value.numel() // source.numel() + 1)[: value.numel()]
            given = replace(plain, args={**plain.args, name: equal.view(value.shape)})
            yield f"values of {other} in {name}", case, given, 2


def of_kinds(
    candidate: Candidate, case: OpCase, of_dtype: list[OpCase], names: list[str]
) -> Iterator[tuple[OpCase, str, list[str]]]:
    """Yields a case, a kind of values, and the inputs that have them: all of these names, or one of
    them alone.

    of_dtype: the cases of this dtype, the smallest first."""
    every = [case, *(one for one in of_dtype if str(one) != str(case))][:CASES]
    yield from itertools.product(every, KINDS, [names])
    if len(names) > 1:
        yield from ((case, kind, [name]) for kind in LARGE for name in names)
    if sum(declared.floating for declared in candidate.op.inputs.values()) == 1:
        yield from ((case, kind, names) for kind in TAILS)
    for dtype, kinds in OF_RANGE.items():
        if (largest := largest_in(candidate, dtype)) is not None:
            yield from ((largest, kind, names) for kind in kinds)


def largest_in(candidate: Candidate, dtype: torch.dtype) -> OpCase | None:
    """The case in which a sum is the first to overflow; None where this dtype was tried already."""
    if dtype not in candidate.dtypes or candidate.dtypes[0] is dtype:
        return None
    cases = [one for one in candidate.plain() if one.dtype is dtype]
    return max(cases, key=lambda one: elements(candidate.op, one.case), default=None)


def near_overflow(
    candidate: Candidate, case: OpCase, takes: Callable[[OpCase, Inputs], bool]
) -> Iterator[tuple[str, OpCase, Inputs, int]]:
    """Yields a description, a case of float16, inputs and a factor. One of the inputs is positive,
    and half as large as ``takes`` allows; the factor is a power of two. It is asked of those that
    may have any value, or are drawn with infinities."""
    cases = (one for one in (case, *candidate.plain()) if one.dtype is torch.float16)
    if (half := next(cases, None)) is None:
        return
    plain = candidate.inputs(half)
    for name in [name for name in plain.args if _of_any_size(candidate, plain, name)][:RANGED]:
        factor = 2 ** (_doublings(plain, name, partial(takes, half)) - 1)
        if factor > 1:
            large = _positive(plain, name, factor)
            yield f"{name} {factor} times as large in float16", half, large, int(factor)


def _of_any_size(candidate: Candidate, plain: Inputs, name: str) -> bool:
    """Whether finite values of an input may be as large as those of float16 are."""
    declared, value = candidate.op.inputs[name], plain.args[name]
    if declared.many or declared.mutated or value.dtype is not torch.float16:
        return False
    return declared.values is STANDARD or bool(value.isinf().any())


def _positive(inputs: Inputs, name: str, factor: float) -> Inputs:
    return changed_in(inputs, [name], lambda x: x.abs() * factor)


def _doublings(inputs: Inputs, name: str, takes: Callable[[Inputs], bool]) -> int:
    """How often an input can be doubled: it must remain finite where it is, and be taken."""
    finite = inputs.args[name].isfinite()

    def beyond(doublings: int) -> bool:
        large = _positive(inputs, name, 2.0**doublings)
        return bool((large.args[name].isinf() & finite).any()) or not takes(large)

    return bisect.bisect_left(range(POWERS), True, key=beyond) - 1


def numbered(candidate: Candidate, case: OpCase) -> Iterator[tuple[str, Any]]:
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
        if not (distinct(draws) or all(torch.equal(one, one.sort().values) for one in draws)):
            each = drawn.min(), drawn.clamp(min=0).min(), drawn.max()
            yield from ((name, one) for one in dict.fromkeys(int(value) for value in each))


def distinct(draws: list[torch.Tensor]) -> bool:
    """Whether all values of a draw differ, and not by chance: values of different draws are the
    same so often that some within one would be, too."""
    if any(one.unique().numel() < one.numel() for one in draws):
        return False
    times = torch.cat(draws).unique(return_counts=True)[1]
    pairs = int((times * (times - 1) // 2).sum())
    return not pairs or pairs > CHANCE * len(draws)


def in_order(candidate: Candidate, case: OpCase) -> Iterator[tuple[str, Inputs]]:
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


def unused(
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


def other_values(
    candidate: Candidate, params: Mapping[str, Any]
) -> Iterator[tuple[str, Any, bool]]:
    """Yields a parameter, another value, and whether a wrong result for it is advice: for a value
    of the other sign, and for a whole number beyond an axis."""
    for name, value in params.items():
        if type(value) is float and value:
            for other in (0.0, 1.0, 2, FAR * value, LARGEST, -value):
                yield name, other, other < 0
    for name, value in params.items():
        for other in (0, value + BEYOND, -value) if type(value) is int and value else ():
            yield name, other, other != 0
    for name, value in params.items():
        yield from ((name, other, False) for other in _beside(candidate, name, value))


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
