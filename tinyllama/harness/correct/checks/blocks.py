"""Unusual values where a row is several blocks, and in the state that a call changes."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from tinyllama.harness.correct.cases import OpCase, elements
from tinyllama.harness.correct.checks.finding import Candidate
from tinyllama.harness.correct.checks.sizes import resized
from tinyllama.harness.correct.evaluate import Inputs

LONG = (1025, 259)  # of an axis: more than a block of 1,024, or of 128 where that is too much
MOST = 2**15  # elements of the inputs of such a case
FLAT = 256  # elements that are zero, so that whole groups of up to as many are


def in_blocks(
    candidate: Candidate, case: OpCase, names: list[str]
) -> Iterator[tuple[str, OpCase, Inputs]]:
    """Cases whose rows, or what is reduced, are several blocks, with values that a block without
    them would not have: in words, with the inputs.

    A padding of 0 is larger than negative elements; which of equal elements is taken depends on
    the order of the blocks; a group of zeros has no scale of its own.
    """
    for axis in _axes(candidate, names):
        longer = (resized(candidate, case, axis, size) for size in LONG)
        long = next((one for one in longer if one and _fits(candidate, one)), None)
        if long is None:
            continue
        plain = candidate.inputs(long)
        having = [name for name in names if axis in candidate.op.inputs[name].axes]
        every = {
            "all negative": {name: -plain.args[name].abs() - 0.5 for name in having},
            "with ties": {name: (2 * plain.args[name]).round() / 2 for name in having},
            "zero in a block": {
                name: _flat(plain.args[name], candidate.op.inputs[name].axes.index(axis))
                for name in having
            },
        }
        for kind, changed in every.items():
            what = f"{' and '.join(having)} {kind}"
            yield what, long, replace(plain, args={**plain.args, **changed})


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


def in_states(candidate: Candidate, case: OpCase) -> Iterator[tuple[str, Inputs]]:
    """Inputs of an op that changes some: all zero, as of what was never used; and all tiny but one
    of those that change, so that it is divided by what is about as small as an epsilon."""
    op, plain = candidate.op, candidate.inputs(case)
    free = [name for name in plain.args if _may_be_zero(candidate, case, name)]
    for kept in (None, *op.mutated) if op.mutated and free else ():
        changed = [name for name in free if name != kept]
        what = "all zero" if kept is None else "tiny"
        args = {name: _small(plain.args[name], zero=kept is None) for name in changed}
        if args:
            yield f"{' and '.join(args)} {what}", replace(plain, args={**plain.args, **args})


def _may_be_zero(candidate: Candidate, case: OpCase, name: str) -> bool:
    declared = candidate.op.inputs[name]
    values = case.case.values.get(name) or declared.distribution(case.case.dims)
    return declared.floating and values.least is not None and values.least <= 0


def _small(value: Any, *, zero: bool) -> Any:
    if isinstance(value, list):
        return [_small(one, zero=zero) for one in value]
    return value * (0.0 if zero else torch.finfo(value.dtype).tiny ** 0.25)
