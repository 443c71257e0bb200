"""The reference in float64, and what makes it useless as an oracle."""

from collections.abc import Callable
from typing import Any

import torch

from tinyllama.harness.check.compare import near, norm_of_finite
from tinyllama.harness.check.evaluate import Inputs, evaluate
from tinyllama.harness.check.reference import StaysInDouble
from tinyllama.harness.declare.op import Op
from tinyllama.harness.machine.errors import UsageError

GIVE = "give oracle=, a function that computes the same in the dtype of its inputs"
SAME = 1e-9  # of the size of results: runs in float64 that are no more apart are alike


def results_in_double(
    op: Op, call: Callable[..., Any], inputs: Inputs, name: str
) -> dict[str, torch.Tensor]:
    """Results for these inputs in float64, by a function of this name that may be the oracle.

    Raises UsageError where it leaves float64, cannot run in it, or gives other results each time.
    """
    mode = StaysInDouble()
    try:
        with mode:
            results = evaluate(op, call, inputs.double())
    except Exception as error:
        text = f"{mode.rounded} in {name}, the oracle: {GIVE}"
        raise UsageError(
            text
            if mode.rounded
            else f"{name}, the oracle, does not run in float64 on these tensors "
            f"({type(error).__name__}: {error}): {GIVE}; tensors that it takes from elsewhere "
            "must be arguments"
        ) from error
    if mode.rounded:
        raise UsageError(f"{mode.rounded} in {name}, the oracle: {GIVE}")
    again = evaluate(op, call, inputs.double())
    size = max(map(norm_of_finite, results.values()), default=0.0)
    if not all(near(again[n], result, SAME, SAME * size) for n, result in results.items()):
        raise UsageError(
            f"{name}, the reference, is random: two runs on the same inputs differ; make it take "
            "its random values as an argument"
        )
    return results
