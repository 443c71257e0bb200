"""Gradients for upstream gradients that are scaled, masked, or not finite."""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from tinyllama.harness.check.boundary_inputs import PLACES, put
from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.evaluate import Inputs, evaluate
from tinyllama.harness.check.finding import Candidate, Problem, Rank, Unsupported, others
from tinyllama.harness.check.history import Graph, History, Values, find

LOSS_SCALES = (8192, 512, 32)  # of float16: the first at which no result of the reference overflows


def _in_places(gradient: torch.Tensor) -> torch.Tensor:
    """Zero in about half of the elements, and in every third row."""
    mask = torch.rand(gradient.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    if gradient.dim() > 1:
        rows = torch.arange(gradient.shape[:-1].numel()).view(gradient.shape[:-1])
        mask &= (rows % 3 != 0)[..., None]
    return gradient * mask.to(gradient)


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "half_of_the_upstream_gradient": lambda gradient: gradient * 0.5,
    "a_large_upstream_gradient": lambda gradient: gradient * 1024,
    "an_upstream_gradient_with_zeros": _in_places,
    "an_upstream_gradient_of_ones": torch.ones_like,
    "an_upstream_gradient_of_ones_and_zeros": lambda g: 1 - _in_places(torch.ones_like(g)),
}


def scaled_upstream(candidate: Candidate) -> Problem:
    """Gradients are right for upstream gradients that are scaled, masked, or ones; in float16, with
    a loss scale. One that is not finite gives no finite gradient where no other implementation
    gives one: so a loss scale that is too large is found out, and the step left out."""
    if not candidate.op.differentiable:
        raise Unsupported("it has no gradients")
    case = candidate.telling()
    for name, change in CHANGES.items():
        if problem := _wrong(candidate, case, name, change):
            return problem
    half = [each for each in candidate.plain() if each.dtype is torch.float16]
    if (case_in_half := next(filter(candidate.tells, half), None)) is not None:
        for scale in LOSS_SCALES:
            change = partial(torch.mul, other=scale)
            if _finite(candidate, _with_upstream(candidate.inputs(case_in_half), change)):
                if problem := _wrong(candidate, case_in_half, "a_loss_scale", change):
                    return problem
                break
    return _not_finite(candidate, case)


def _wrong(
    candidate: Candidate, case: OpCase, name: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> Problem:
    inputs = _with_upstream(candidate.inputs(case), change)
    if not _finite(candidate, inputs):
        return None
    history = History(f"call with_{name}; backward with_{name}")
    return find(candidate, history, {f"with_{name}": Values(case, inputs)}.get)


def _with_upstream(inputs: Inputs, change: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
    upstream = {n: g if g is None else change(g) for n, g in inputs.upstream.items()}
    return replace(inputs, upstream=upstream)


def _finite(candidate: Candidate, inputs: Inputs) -> bool:
    results = evaluate(candidate.op, candidate.op["eager"].call, inputs)
    return all(value.isfinite().all() for value in results.values())


def _not_finite(candidate: Candidate, case: OpCase) -> Problem:
    """What is wrong where one element of each upstream gradient is infinite, or a NaN."""
    for value, rank in ((math.inf, Rank.WRONG), (math.nan, Rank.WARNING)):
        inputs = _with_upstream(candidate.inputs(case), partial(put, number=value, place=PLACES[0]))
        usual = [evaluate(candidate.op, candidate.op["eager"].call, inputs)]
        usual += others(candidate, inputs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of numpy, which interprets
            gradients = Graph(candidate, inputs).gradients()
        for of, gradient in gradients.items():
            name = f"grad {of}"
            finite = any(other[name].isfinite().all() for other in usual if name in other)
            if gradient.isfinite().all() and not finite:
                return case, f"{value} in an upstream gradient does not reach {name}", rank
    return None
