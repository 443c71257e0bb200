"""A call under torch's transforms: forward derivatives, and `vmap`. Each may be refused by an
error; what it gives is to be right."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import forward_ad

from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.compare import SLACK, apart, near
from tinyllama.harness.check.evaluate import Inputs, Leaves, copied
from tinyllama.harness.check.finding import Candidate, Problem, Rank
from tinyllama.harness.check.history import outputs_of

MOST_APART = 1e-3  # of the norm of a result
BATCH = 3  # calls that are made as one


def transformed(candidate: Candidate, case: OpCase) -> Problem:
    """What is wrong with a forward derivative, or with a call of several inputs at once."""
    if candidate.op.mutated:
        return None
    inputs, advice = candidate.inputs(case), None
    eager = replace(candidate, provider=candidate.op["eager"])
    for name in candidate.op.differentiable:
        own = _forward_derivatives(candidate, inputs, name)
        exact = inputs.double()
        known = None if own is None else _forward_derivatives(eager, exact, name)
        if own is None or known is None:
            continue
        usual = _forward_derivatives(eager, inputs, name) or known
        for which, *each in zip(candidate.op.outputs, own, known, usual, strict=False):
            one, right, rounded = each
            if right is None or rounded is None:
                continue
            if one is None:  # as of each custom op of torch
                text = f"{which} has no forward derivative by {name}, and there is no error"
                advice = advice or (case, text, Rank.WARNING)
            elif _apart(one, right, SLACK * apart(rounded, right).norm()):
                return case, f"the forward derivative of {which} by {name} is not the reference's"
    for axis, names in _batched(candidate, inputs):
        own = _at_once(candidate, inputs, names, axis)
        known = None if own is None else _each(candidate, inputs, names, axis)
        if own is None or known is None:
            continue
        for which, one, right in zip(candidate.op.outputs, own, known, strict=False):
            if one.shape != right.shape or _apart(one, right):
                text = f"torch.vmap along axis {axis} of {', '.join(names)}"
                return case, f"{text}: {which} is not that of calls one by one"
    return advice


def _apart(one: torch.Tensor, other: torch.Tensor, most: Any = 0.0) -> bool:
    return not near(one, other, MOST_APART, float(most))


def _forward_derivatives(candidate: Candidate, inputs: Inputs, name: str) -> Any:
    """Of each output in a direction of random numbers; None where there is an error."""
    args = {n: copied(value) for n, value in inputs.args.items()}
    made = torch.Generator().manual_seed(0)
    direction = torch.randn(args[name].shape, generator=made).to(args[name])
    try:
        with forward_ad.dual_level():
            args[name] = forward_ad.make_dual(args[name], direction)
            outputs = outputs_of(candidate, args, inputs.params)
            found = [forward_ad.unpack_dual(one).tangent for one in outputs]
            return [one if one is None else one.clone() for one in found]
    except Exception:
        return None


def _batched(candidate: Candidate, inputs: Inputs) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Where a batch is put, and in which inputs: before each of all, and behind one alone."""
    names = [n for n, one in inputs.args.items() if isinstance(one, torch.Tensor)]
    floating = tuple(name for name in names if inputs.args[name].is_floating_point())
    yield 0, floating
    for name in floating:
        yield inputs.args[name].dim(), (name,)


def _stacked(inputs: Inputs, names: tuple[str, ...], axis: int) -> Leaves:
    def batch(value: torch.Tensor) -> torch.Tensor:
        return torch.stack([value * (1 + 0.5 * place) for place in range(BATCH)], axis)

    return {n: batch(one) if n in names else copied(one) for n, one in inputs.args.items()}


def _at_once(candidate: Candidate, inputs: Inputs, names: tuple[str, ...], axis: int) -> Any:
    args = _stacked(inputs, names, axis)

    def call(*given: torch.Tensor) -> Any:
        each = dict(zip(names, given, strict=True))
        return outputs_of(candidate, {**args, **each}, inputs.params)

    try:
        with torch.no_grad():
            return torch.vmap(call, in_dims=axis)(*(args[name] for name in names))
    except Exception:
        return None


def _each(candidate: Candidate, inputs: Inputs, names: tuple[str, ...], axis: int) -> Any:
    args = _stacked(inputs, names, axis)
    found = []
    try:
        with torch.no_grad():
            for place in range(BATCH):
                each = {name: args[name].select(axis, place).contiguous() for name in names}
                found.append(outputs_of(candidate, {**args, **each}, inputs.params))
    except Exception:
        return None
    return [torch.stack(one) for one in zip(*found, strict=True)]
