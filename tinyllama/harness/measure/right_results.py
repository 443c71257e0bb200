"""Whether the results of a timed call are right: by the rule of `check`, at less cost.

What the rule allows is more where results for inputs that are moved by a rounding are known
(`tinyllama.harness.check.compare`). So results that pass without them are right, and the reference
runs eight more times, on such inputs, for others alone, and for integers.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from tinyllama.harness.check.cases import PERTURBATIONS, OpCase, References
from tinyllama.harness.check.compare import SLACK, Comparison
from tinyllama.harness.check.evaluate import ContractError, Inputs, evaluate


class WrongResultError(AssertionError):
    """A timed call whose outputs are not right."""


class Compared(NamedTuple):
    """Right results: what they were compared with, and the comparisons. Empty results have none."""

    references: References
    comparisons: list[Comparison]


def references_for(case: OpCase, inputs: Inputs, draws: int) -> References:
    """What results for these inputs are compared with, with the strides that the reference's have.
    draws: of moved inputs."""
    as_given = evaluate(case.op, case.op["eager"].call, inputs)
    return replace(case.references(inputs, draws), eager=as_given)


def require_right(case: OpCase, results: Mapping[str, torch.Tensor], inputs: Inputs) -> Compared:
    """Compare results for these inputs with the reference's. Raises WrongResultError."""
    references = references_for(case, inputs, 0)
    for name, expected in references.eager.items():
        if name not in results:
            raise WrongResultError(f"no {name}")
        dtypes = expected.dtype, case.provider.output_dtypes.get(name)
        if (value := results[name]).shape != expected.shape or value.dtype not in dtypes:
            shape = f"{tuple(value.shape)} {value.dtype}"
            raise WrongResultError(f"{name} is {shape}, unlike the reference's")
    floating = all(oracle.is_floating_point() for oracle in references.oracle.values())
    slack = SLACK * case.provider.slack_in(case.dtype)
    failed: list[str] = []
    for draws in (0, PERTURBATIONS) if floating else (PERTURBATIONS,):
        if draws:
            references = references_for(case, inputs, draws)
        try:
            comparisons = case.judge(dict(results), inputs, slack=slack, references=references)
        except ContractError as error:
            raise WrongResultError(str(error)) from error
        failed = [str(comparison) for comparison in comparisons if not comparison.passed]
        if not failed:
            return Compared(references, comparisons)
    raise WrongResultError(failed[0])
