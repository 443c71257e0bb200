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

from tinyllama.harness.check.blocks import half_a_row, half_left_out, in_blocks, in_states
from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.crash import raised_by_another, refuses
from tinyllama.harness.check.differing import (
    RefusedError,
    cancels,
    differs,
    has_digits,
    is_convention,
    untold,
    wrong_nan,
)
from tinyllama.harness.check.evaluate import ContractError, Inputs, is_gradient
from tinyllama.harness.check.finding import Candidate, Problem, Rank, Unsupported
from tinyllama.harness.check.histories import shared_memory
from tinyllama.harness.check.resizing import general
from tinyllama.harness.check.settings import of_several
from tinyllama.harness.check.unusual import (
    INFINITIES,
    KINDS,
    LARGE,
    TAIL,
    TAILS,
    Change,
    changed_in,
    having,
    in_order,
    in_places,
    near_overflow,
    numbered,
    of_first_row,
    of_kinds,
    other_values,
    unused,
)
from tinyllama.harness.declare.specs import FLOATS, STANDARD

# Of these kinds, results are not compared where the reference has lost its digits.
SENSITIVE = ("tiniest", "shifted", "shifted far down", "shifted far up", *TAILS)
CONVENTIONAL = ("all zero", "with ties")  # there functions such as a maximum have no gradient


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
    all_alike = [
        (one, *pair)
        for one in (() if candidate.op.mutated else each.values())
        for pair in numbered(candidate, one)
    ]
    given_settings = list(of_several(candidate, case))
    placed = itertools.chain(in_places(candidate, case, names), in_states(candidate, case))
    ordered = in_order(candidate, case)
    large = list(near_overflow(candidate, case, _takes))
    if not (names or all_alike or given_settings or any(placed) or any(ordered) or large):
        raise Unsupported("no input may have any value, and no parameter another one")
    for (one, name, value), row in itertools.product(all_alike, (False, True)):
        filled: Change = partial(of_first_row if row else torch.full_like, fill_value=value)
        alike = changed_in(candidate.inputs(one), [name], filled)
        with contextlib.suppress(RefusedError):
            seen = differs(candidate, one, alike, refusable=True)
            if said := seen[1] if seen is not None else shared_memory(candidate, alike):
                return one, f"{name} all {value}{' in its first row' * row}: {said}"
    for what, arranged in () if candidate.op.mutated else in_order(candidate, case):
        with contextlib.suppress(RefusedError):
            if (seen := differs(candidate, case, arranged, refusable=True)) is not None:
                return case, f"{what}: {seen[1]}"
    advice = None
    refused: dict[str, None] = {}
    noted = partial(_noted, candidate, refused)
    for one, kind, of in of_kinds(candidate, case, of_dtype, names) if names else ():
        change, what = (KINDS | TAILS)[kind], f"{' and '.join(of)} {kind}"
        usual = candidate.inputs(one)
        changed = changed_in(usual, of, change)
        with noted(what):
            if kind in SENSITIVE and cancels(one, changed):
                continue
            # Of several inputs, terms may be products of two.
            times = LARGE.get(kind, 1) ** min(2, len(of))
            seen = differs(candidate, one, changed, usual=usual, times=times)
            if seen is None or (kind in TAILS and is_gradient(seen[0])):
                continue
            name, text = seen
            if kind in TAILS and not differs(candidate, one, changed, usual=usual, times=TAIL):
                text = f"{what}, results that are small beside 1 are lost: {text}"
            elif kind not in CONVENTIONAL or not is_convention(candidate, changed, name):
                return one, f"{what}: {text}"
            else:
                text = f"{what}, the gradient is not the reference's: {text}"
            advice = advice or (one, text, Rank.WARNING)
    # Each with a factor of its values, and whether the reference may lose its digits there.
    for what, one, changed, times, may_cancel in itertools.chain(
        ((*each, each[3] > 1) for each in in_places(candidate, case, names)),
        ((*each, False) for each in in_blocks(candidate, case, names)),
        ((*each, 1, False) for each in in_states(candidate, case)),
        ((*each, False) for each in large),
    ):
        with noted(what):
            if may_cancel and cancels(one, changed):
                continue
            seen = differs(candidate, one, changed, usual=candidate.inputs(one), times=times)
            if seen is not None and not is_convention(candidate, changed, seen[0]):
                return one, f"{what}: {seen[1]}"
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
            said = seen[1] if seen is not None else shared_memory(candidate, changed)
            if said:
                return case, f"{named}: {said}"
    for parameter, other, advised in other_values(candidate, plain.params):
        if (wrong := _other(candidate, case, parameter, other, names)) is not None:
            text = f"{parameter} = {other!r}: {wrong}"
            if not advised:
                return case, text
            advice = advice or (case, text, Rank.WARNING)
    for name, value in itertools.product(names, INFINITIES):
        for where, put in (("in", having), ("in the first row of", of_first_row)):
            infinite = changed_in(plain, [name], partial(put, fill_value=value))
            with noted(f"{value} {where} {name}"):
                if lost := wrong_nan(candidate, case, infinite, of_nan=False):
                    return case, f"{value} {where} {name}: {lost}"
    for what, infinite, right in unused(candidate, case, names):
        with noted(what):
            results = candidate.forward_only().results(infinite)
            own = (n for n, one in right.items() if (results[n].isnan() & ~one.isnan()).any())
            if reached := ", ".join(own):
                return case, f"{what}: a NaN reaches {reached}"
    for name in names:
        with noted(f"half a row of -inf in {name}"):
            if (found := half_a_row(candidate, case, name)) is not None:
                if len(found) == 2:
                    return found
                advice = advice or found
    for name in dict.fromkeys(name for _, name, value in all_alike if value is False):
        if (found := half_left_out(candidate, case, name)) is not None:
            return found
    for name in names:
        with noted(f"a NaN in {name}"):
            if flag := untold(candidate, plain, name):
                return case, f"{flag} tells of an infinity in {name}, and not of a NaN"
            given_nan = changed_in(plain, [name], partial(having, fill_value=math.nan))
            if advice is None and (lost := wrong_nan(candidate, case, given_nan)):
                advice = case, f"a NaN in {name} {lost}", Rank.WARNING
    return advice or (f"not with {'; '.join(refused)}" if refused else None)


def _takes(case: OpCase, inputs: Inputs) -> bool:
    """Whether the reference takes these inputs, and keeps its digits in the case's dtype."""
    with contextlib.suppress(Exception):  # what it refuses
        return has_digits(case, inputs)
    return False


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


def _other(
    candidate: Candidate, case: OpCase, parameter: str, other: Any, names: list[str]
) -> str | None:
    """What is wrong for another value of a parameter: 1.0, at which a factor makes no difference, a
    whole number, a large one, and one of the other sign, also far apart: there the largest element
    becomes the least one. Zero, which some take for none that is given, is tried on tiny inputs,
    too, where a small parameter is seen, and far apart, where what it is a power of may be zero.
    Each may be refused, but for 1.0."""
    op, usual = candidate.op, candidate.inputs(case)
    given = {**usual.params, parameter: other}
    if op.misfit(case.case.dims, given) is not None:
        return None
    changed, real = replace(usual, params=given), type(other) is float
    zero = real and other == 0
    plain = usual if zero else changed
    try:
        if (seen := differs(candidate, case, changed, refusable=True)) is not None:
            return seen[1]
        for kind in ["tiny"] * zero + ["far apart"] * (real and other <= 0):
            one, times = changed_in(changed, names, KINDS[kind]), LARGE.get(kind, 1)
            seen = differs(candidate, case, one, refusable=True, usual=plain, times=times)
            if seen is not None:
                return seen[1]
        return None if zero else shared_memory(candidate, changed)
    except Exception as error:
        if isinstance(error, RefusedError) or (refuses(error) and not (real and other == 1)):
            return None
        raise
