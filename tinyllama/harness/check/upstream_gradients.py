"""Gradients for upstream gradients that are scaled, masked, or not finite."""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.compare import near, norm_of_finite
from tinyllama.harness.check.evaluate import Inputs, evaluate
from tinyllama.harness.check.finding import Candidate, Problem, Rank, Unsupported, others
from tinyllama.harness.check.history import Graph
from tinyllama.harness.check.unusual import having

LOSS_SCALES = (8192, 512, 32)  # of float16: the first at which no result of the reference overflows


def _in_places(gradient: torch.Tensor) -> torch.Tensor:
    """Zero in about half of the elements, and in every third row."""
    mask = torch.rand(gradient.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    if gradient.dim() > 1:
        rows = torch.arange(gradient.shape[:-1].numel()).view(gradient.shape[:-1])
        mask &= (rows % 3 != 0)[..., None]
    return gradient * mask.to(gradient)


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "half of the upstream gradient": lambda gradient: gradient * 0.5,
    "1,024 times the upstream gradient": lambda gradient: gradient * 1024,
    "an upstream gradient that is zero in places": _in_places,
    "an upstream gradient of ones": torch.ones_like,
    "an upstream gradient of ones and zeros": lambda g: 1 - _in_places(torch.ones_like(g)),
}


def scaled_upstream(candidate: Candidate) -> Problem:
    """Gradients are right for upstream gradients that are scaled, masked, or ones; in float16, with
    a loss scale. One that is not finite gives no finite gradient where no other implementation
    gives one: so a loss scale that is too large is found out, and the step left out."""
    if not candidate.op.differentiable:
        raise Unsupported("it has no gradients")
    case = candidate.telling()
    for text, change in CHANGES.items():
        inputs = _with_upstream(candidate.inputs(case), change)
        if _finite(candidate, inputs) and (wrong := _wrong(candidate, case, inputs)):
            return case, f"{text}: {wrong}"
    return _in_half(candidate) or _not_finite(candidate, case)


def _with_upstream(inputs: Inputs, change: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
    upstream = {n: g if g is None else change(g) for n, g in inputs.upstream.items()}
    return replace(inputs, upstream=upstream)


def _of_reference(candidate: Candidate, inputs: Inputs) -> dict[str, torch.Tensor]:
    return evaluate(candidate.op, candidate.op["eager"].call, inputs)


def _finite(candidate: Candidate, inputs: Inputs) -> bool:
    return all(value.isfinite().all() for value in _of_reference(candidate, inputs).values())


def _wrong(candidate: Candidate, case: OpCase, inputs: Inputs) -> str:
    """What is wrong with a gradient, by more than the terms of a sum that cancels are rounded: of a
    softmax, the gradient of ones is zero."""
    results, references = candidate.results(inputs), case.references(inputs)
    plain = _of_reference(candidate, candidate.inputs(case))
    least = max(1e-3, *(4 * torch.finfo(dtype).eps for dtype in candidate.dtypes))
    for wrong in candidate.wrong(case, results, inputs, references):
        right = references.oracle[wrong.name]
        size = least * max(map(norm_of_finite, (plain[wrong.name], right)))
        if wrong.name not in results or not near(results[wrong.name], right, least, size):
            return str(wrong)
    return ""


def _in_half(candidate: Candidate) -> Problem:
    """What is wrong in float16 with an upstream gradient times a loss scale, as large as the
    reference takes it: a product on the way may overflow."""
    cases = [case for case in candidate.plain() if case.dtype is torch.float16]
    if (case := next(filter(candidate.tells, cases), None)) is None:
        return None
    for scale in LOSS_SCALES:
        inputs = _with_upstream(candidate.inputs(case), partial(torch.mul, other=scale))
        if _finite(candidate, inputs):
            wrong = candidate.wrong(case, candidate.results(inputs), inputs)
            return (case, f"with a loss scale of {scale}: {wrong[0]}") if wrong else None
    return None


def _not_finite(candidate: Candidate, case: OpCase) -> Problem:
    """What is wrong where one element of each upstream gradient is infinite, or a NaN."""
    for value, rank in ((math.inf, Rank.WRONG), (math.nan, Rank.WARNING)):
        inputs = _with_upstream(candidate.inputs(case), partial(having, fill_value=value))
        usual = [_of_reference(candidate, inputs), *others(candidate, inputs)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of numpy, which interprets
            gradients = Graph(candidate, inputs).gradients()
        for of, gradient in gradients.items():
            name = f"grad {of}"
            finite = any(other[name].isfinite().all() for other in usual if name in other)
            if gradient.isfinite().all() and not finite:
                return case, f"{value} in an upstream gradient does not reach {name}", rank
    return None
