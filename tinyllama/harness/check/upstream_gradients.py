"""Gradients for upstream gradients that are scaled, masked, or not finite."""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from tinyllama.harness.check.boundary_inputs import PLACES, put
from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.evaluate import Inputs
from tinyllama.harness.check.finding import Candidate, Problem, Rank, Unsupported, other_results
from tinyllama.harness.check.history import Graph, History, Values, find

LOSS_SCALES = (8192, 512, 32)  # of float16: the first at which no result of the reference overflows
Change = Callable[[torch.Tensor], torch.Tensor]


def _with_zeros(gradient: torch.Tensor) -> torch.Tensor:
    """Zero in about half of the elements, and in every third row."""
    mask = torch.rand(gradient.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    if gradient.dim() > 1:
        rows = torch.arange(gradient.shape[:-1].numel()).view(gradient.shape[:-1])
        mask &= (rows % 3 != 0)[..., None]
    return gradient * mask.to(gradient)


CHANGES: dict[str, Change] = {
    "a_large_upstream_gradient": lambda gradient: gradient * 1024,
    "an_upstream_gradient_with_zeros": _with_zeros,
    "an_upstream_gradient_of_ones": torch.ones_like,
    "an_upstream_gradient_of_ones_and_zeros": lambda g: 1 - _with_zeros(torch.ones_like(g)),
}


def scaled_upstream(candidate: Candidate) -> Problem:
    """Gradients are right for upstream gradients that are scaled, masked, or ones; in float16, with
    a loss scale. One that is not finite gives no finite gradient where no other implementation
    gives one: so a loss scale that is too large is found out, and the step left out."""
    if not candidate.op.differentiable:
        raise Unsupported("it has no gradients")
    case = candidate.telling()
    changes = [(case, name, change) for name, change in CHANGES.items()]
    halves = (x for x in candidate.plain_cases() if x.dtype is torch.float16)
    if (in_half := next(filter(candidate.tells, halves), None)) is not None:
        scales = (partial(torch.mul, other=scale) for scale in LOSS_SCALES)
        inputs = candidate.inputs(in_half)
        scale = next((s for s in scales if _finite(candidate, _changed(inputs, s))), None)
        changes += [] if scale is None else [(in_half, "a_loss_scale", scale)]
    for of_case, name, change in changes:
        inputs = _changed(candidate.inputs(of_case), change)
        history = History(f"call with_{name}; backward with_{name}")
        values = {f"with_{name}": Values(of_case, inputs)}
        if _finite(candidate, inputs) and (problem := find(candidate, history, values.get)):
            return problem
    return _not_finite(candidate, case)


def _changed(inputs: Inputs, change: Change) -> Inputs:
    upstream = {n: g if g is None else change(g) for n, g in inputs.upstream.items()}
    return replace(inputs, upstream=upstream)


def _finite(candidate: Candidate, inputs: Inputs) -> bool:
    results = candidate.reference_results(inputs).values()
    return all(value.isfinite().all() for value in results)


def _not_finite(candidate: Candidate, case: OpCase) -> Problem:
    """What is wrong where one element of each upstream gradient is infinite, or a NaN."""
    for value, rank in ((math.inf, Rank.WRONG), (math.nan, Rank.WARNING)):
        inputs = _changed(candidate.inputs(case), partial(put, number=value, place=PLACES[0]))
        right = [candidate.reference_results(inputs), *other_results(candidate, inputs)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of numpy, which interprets
            gradients = Graph(candidate, inputs).gradients()
        for of, gradient in gradients.items():
            name = f"grad {of}"
            finite = any(r[name].isfinite().all() for r in right if name in r)
            if gradient.isfinite().all() and not finite:
                return case, f"{value} in an upstream gradient does not reach {name}", rank
    return None
