"""Whether the results of a timed call are right, by a rule that needs two runs of the reference, in
the dtype of the call and in float64. `check` allows less, and needs eight more runs for that.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from tinyllama.harness.check.cases import PERTURBATIONS, OpCase
from tinyllama.harness.check.compare import Reference, compare
from tinyllama.harness.check.evaluate import Inputs, evaluate

SLACK = 4.0  # times eager's own error
LEAST_FACTOR = 1e-3  # a factor that differs from 1 by less is not looked for: norms show it
FEW = 16  # elements


class WrongResultError(AssertionError):
    """A timed call whose outputs are not right."""


class Right(NamedTuple):
    """A right result. error: how far one like it may be from the exact result, as a norm. norms:
    how far the norms of the two may be apart."""

    reference: Reference
    error: float
    norms: float


def references(case: OpCase, inputs: Inputs) -> dict[str, Reference]:
    """What each result for these inputs is compared with. Integers, and results of a few elements,
    in which the reference may be right by chance, also with those of inputs that are moved by a
    rounding."""
    op, eager = case.op, case.op["eager"].call
    usual, exact = evaluate(op, eager, inputs), evaluate(op, eager, inputs.double())
    magnitudes = case.magnitudes(inputs.double(), exact)
    integers = {name for name, x in exact.items() if not x.is_floating_point()}
    sampled = integers | {name for name, x in exact.items() if x.numel() <= FEW}
    wanted = tuple(leaf for leaf in op.differentiable if f"grad {leaf}" in sampled)
    moved: dict[str, list[torch.Tensor]] = {name: [] for name in exact}
    for draw in range(PERTURBATIONS if integers else 2 if sampled else 0):
        perturbed = replace(inputs.perturbed(draw), wanted=wanted)
        results = evaluate(op, eager, perturbed, watched=False)
        for name in sampled:
            moved[name].append(results[name])
    off_by = {name: output.off_by for name, output in op.outputs.items()}
    return {
        name: Reference(
            usual[name], oracle, moved[name], magnitudes.get(name), off_by.get(name, 0), op.terms
        )
        for name, oracle in exact.items()
    }


def hold(case: OpCase, results: Mapping[str, torch.Tensor], inputs: Inputs) -> dict[str, Right]:
    """Hold results for these inputs to what the reference gives in float64: the error of each
    tensor and of its worst row may be a multiple of that which the reference has in their dtype. So
    may that of the norm of the whole, in which the roundings of its rows (along its longest
    dimension, in which they may be common) average out and a factor does not: one of 1.01 shows in
    bfloat16. Elements that are not finite, and integers, are compared as `check` does.

    Raises WrongResultError.
    """
    slack, dtypes = case.provider.slack_in(case.dtype), case.provider.output_dtypes
    right = {}
    for name, reference in references(case, inputs).items():
        if name not in results:
            raise WrongResultError(f"no {name}")
        value, expected = results[name], reference.eager
        as_declared = value.dtype in (expected.dtype, dtypes.get(name))
        if value.shape != expected.shape or not as_declared:
            shape = f"{tuple(value.shape)} {value.dtype}"
            raise WrongResultError(f"{name} is {shape}, unlike the reference's")
        if expected.is_floating_point():
            right[name] = _numbers_held(name, value, reference, slack)
            continue
        comparison = compare(name, value, reference, slack=SLACK * slack)
        if not comparison.passed:
            raise WrongResultError(str(comparison))
        others = (reference.eager, *reference.perturbed)
        errors = [float((reference.of_finite(x) - reference.exact).norm()) for x in others]
        apart = math.hypot(*errors) + reference.off_by * math.sqrt(reference.exact.numel())
        right[name] = Right(reference, apart, apart)
    return right


def _numbers_held(name: str, value: torch.Tensor, reference: Reference, slack: float) -> Right:
    eps = torch.finfo(reference.eager.dtype).eps
    finite, exact = reference.of_finite(reference.eager), reference.exact
    usual_errors = [_norms(finite - exact)]
    if reference.perturbed:
        spread = 1 + math.sqrt(2 * math.log(1e4) / exact.numel())  # as of `compare`
        moved = reference.moved
        usual_errors.append((spread * float(moved.rows.max()), spread * float(moved.total)))
    rounded = [exact]
    if reference.magnitude is not None:
        terms_eps = torch.finfo(reference.terms.dtype or reference.eager.dtype).eps
        rounded.append(min(1.0, terms_eps / eps) * reference.of_finite(reference.magnitude))
    errors = zip(
        _norms(reference.apart(value)),
        map(max, zip(*usual_errors, strict=True)),
        map(max, zip(*map(_norms, rounded), strict=True)),
        (" in a row", ""),
        strict=True,
    )
    size = float(exact.norm())
    for error, usual, terms, where in errors:
        allowed = SLACK * slack * max(usual, eps * terms)
        if not error <= allowed < math.inf:
            raise WrongResultError(f"{name}: error {error:.3g} > {allowed:.3g}{where}")
    averaged = allowed * math.sqrt(max(exact.shape) / exact.numel())
    usual = SLACK * abs(float(finite.norm()) - size)
    across = allowed and allowed**2 / max(2 * size, allowed)  # of errors at right angles to it
    norms = max(averaged, slack * max(usual, max(eps, LEAST_FACTOR) * size)) + across
    hold_norm(name, float(reference.of_finite(value).norm()), size, norms)
    return Right(reference, allowed, norms)


def hold_norm(name: str, norm: float, exact: float, apart: float) -> None:
    """Raises WrongResultError for a result whose norm is farther than this from the exact one."""
    if not abs(norm - exact) <= apart:
        raise WrongResultError(
            f"{name}: its norm is {norm:.5g}, not {exact:.5g} as in float64, and may be "
            f"{apart:.2g} apart: a common factor"
        )


def _norms(value: torch.Tensor) -> tuple[float, float]:
    """The norm of the widest row of a tensor in float64, and that of the whole tensor."""
    rows = value.norm(dim=-1)
    return float(rows.max()), float(rows.norm())
