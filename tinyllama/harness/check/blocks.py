"""Unusual values where a row is several blocks, and in the state that a call changes."""

import contextlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tinyllama.harness.check.cases import OpCase, elements
from tinyllama.harness.check.compare import near, same_bits
from tinyllama.harness.check.differing import RefusedError, differs, wrong_nan
from tinyllama.harness.check.evaluate import Inputs, evaluate
from tinyllama.harness.check.finding import Candidate, Problem, Rank
from tinyllama.harness.check.resizing import MOST_ELEMENTS, UNLIKE, resized
from tinyllama.harness.check.unusual import (
    FAR,
    KINDS,
    SHIFT,
    WIDEST,
    changed_in,
    evenly,
    largest_in,
    may_be_zero,
)
from tinyllama.harness.declare.specs import STANDARD

HALVED = (2051, 259)  # lengths of a row of which half is more than a block of 1,024, or of 128
ROWS = 4  # of which one is sought that leaves no output of the reference infinite
LONG = (1025, 259)  # of an axis: more than a block of 1,024, or of 128 where that is too much
OF_BLOCKS = ("all negative", "with ties")  # kinds that are tried in a later block of a row, too
MOST = 2**15  # elements of the inputs of such a case
FLAT = 256  # elements that are zero, so that whole groups of up to as many are


def in_blocks(
    candidate: Candidate, case: OpCase, names: list[str]
) -> Iterator[tuple[str, OpCase, Inputs, int]]:
    """Yields a description, a case, its inputs and their factor, for cases whose rows, or reduced
    axes, span several blocks. The values are unusual: of a kind, evenly spaced, or zero in one
    block.

    A padding of 0 is larger than negative elements. Which of equal elements is taken depends on the
    order of the blocks. A group of zeros has no scale of its own.
    """
    for axis in _axes(candidate, names):
        longer = (resized(candidate, case, axis, size) for size in LONG)
        long = next((one for one in longer if one and _fits(candidate, one)), None)
        if long is None:
            continue
        plain = candidate.inputs(long)
        having = [name for name in names if axis in candidate.op.inputs[name].axes]
        named = " and ".join(having)
        for kind in OF_BLOCKS:
            yield f"{named} {kind}", long, changed_in(plain, having, KINDS[kind]), 1
        yield f"{named} evenly spaced", long, changed_in(plain, having, evenly), WIDEST
        places = {name: candidate.op.inputs[name].axes.index(axis) for name in having}
        flat = {name: _flat(plain.args[name], place) for name, place in places.items()}
        yield f"{named} zero in a block", long, replace(plain, args={**plain.args, **flat}), 1


def _axes(candidate: Candidate, names: list[str]) -> list[str]:
    """The last axis of each input, and those that some output lacks."""
    op, found = candidate.op, dict[str, None]()
    for axes in (op.inputs[name].axes for name in names):
        lacking = [a for a in axes if any(a not in one.axes for one in op.outputs.values())]
        found |= dict.fromkeys((*axes[-1:], *lacking))
    return [*found]


def _fits(candidate: Candidate, case: OpCase) -> bool:
    return elements(candidate.op, case.case) <= MOST and candidate.takes(case)


def _flat(x: torch.Tensor, place: int) -> torch.Tensor:
    """x with zeros in the second block along an axis."""
    changed = x.clone()
    width = min(FLAT, x.shape[place] // 2)
    changed.narrow(place, width, width).zero_()
    return changed


def in_states(candidate: Candidate, case: OpCase) -> Iterator[tuple[str, OpCase, Inputs]]:
    """Yields a description, the case and inputs of an op that works in place. They are all zero, as
    in the state of an optimizer before its first step; or all tiny except one of those that the op
    changes, so that this one is divided by a number about as small as an epsilon; or, where any
    value may come, all large, in float16 too, whose squares overflow."""
    op, plain = candidate.op, candidate.inputs(case)
    free = [name for name in plain.args if may_be_zero(candidate, case, name)]
    for kept in (None, *op.mutated) if op.mutated and free else ():
        changed = [name for name in free if name != kept]
        what = "all zero" if kept is None else "tiny"
        args = {name: _small(plain.args[name], zero=kept is None) for name in changed}
        if args:
            yield f"{' and '.join(args)} {what}", case, replace(plain, args={**plain.args, **args})
    anything = [name for name, one in op.inputs.items() if one.floating and one.values is STANDARD]
    for one, factor in ((case, FAR), (largest_in(candidate, torch.float16), SHIFT)):
        if one is not None and op.mutated and anything:
            usual = candidate.inputs(one)
            args = {name: _times(usual.args[name], factor) for name in anything}
            what = f"{' and '.join(args)} {factor} times as large"
            yield what, one, replace(usual, args={**usual.args, **args})


def _small(value: Any, *, zero: bool) -> Any:
    if isinstance(value, list):
        return [_small(one, zero=zero) for one in value]
    return _times(value, 0.0 if zero else torch.finfo(value.dtype).tiny ** 0.25)


def _times(value: Any, factor: float) -> Any:
    if isinstance(value, list):
        return [_times(one, factor) for one in value]
    return (value.double() * factor).to(value.dtype)  # floats of 8 bits cannot be multiplied


def half_a_row(candidate: Candidate, case: OpCase, name: str) -> Problem:
    """What is wrong where the first half of a row, more than a block, is -inf, as after
    masking: an output is a NaN that is one nowhere else, or differs. It is advice if a NaN reaches
    gradients alone, and no output of the reference depends on that half: where attention leaves a
    key out with a probability of 0, torch's own gradients are 0 times infinity there."""
    op = candidate.op
    for axis, size in itertools.product(op.inputs[name].axes[-1:], HALVED):
        long = resized(candidate, case, axis, size)
        if long is None or elements(op, long.case) > MOST_ELEMENTS or not candidate.takes(long):
            continue
        usual = candidate.inputs(long)
        for row in range(ROWS):
            changed = changed_in(usual, [name], partial(_half, row))
            known = evaluate(op, op["eager"].call, changed)
            if any(known[one].double().isinf().any() for one in op.outputs):
                continue
            advice, judged = None, candidate
            if lost := wrong_nan(candidate, long, changed, of_nan=False):
                plain = evaluate(op, op["eager"].call, usual)
                if any(not same_bits(known[one], plain[one]) for one in op.outputs):
                    return long, f"half a row of -inf in {name}: {lost}"
                judged = candidate.forward_only()
                if of_outputs := wrong_nan(judged, long, changed, of_nan=False):
                    return long, f"half a row of -inf in {name}: {of_outputs}"
                advice = long, f"half a row of -inf in {name}: {lost}", Rank.WARNING
            for which, found in judged.results(changed).items():
                right = known[which]
                held = right.is_floating_point() and right.double().isfinite().all()
                if held and not near(found, right, UNLIKE):
                    return long, f"half a row of -inf in {name}: {which} is not the reference's"
            return advice
    return None


def half_left_out(candidate: Candidate, case: OpCase, name: str) -> Problem:
    """What is wrong where a mask leaves out the first half of a row, more than a block."""
    for axis, size in itertools.product(candidate.op.inputs[name].axes[-1:], HALVED):
        long = resized(candidate, case, axis, size)
        if long is None or elements(candidate.op, long.case) > MOST_ELEMENTS:
            continue
        changed = changed_in(candidate.inputs(long), [name], partial(_half, 0, fill_value=False))
        with contextlib.suppress(RefusedError):
            if (seen := differs(candidate, long, changed, refusable=True)) is not None:
                return long, f"half a row of {name} is False: {seen[1]}"
            return None
    return None


def _half(row: int, x: torch.Tensor, fill_value: Any = -math.inf) -> torch.Tensor:
    changed = x.clone()
    rows = changed.view(-1, x.shape[-1])
    rows[row % len(rows), : x.shape[-1] // 2] = fill_value
    return changed
