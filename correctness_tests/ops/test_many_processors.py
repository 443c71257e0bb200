"""Gradients of gains, whose partial sums are as many as a GPU with many processors makes."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tinyllama.harness.check.run import Candidate
from tinyllama.harness.kernels import processors_of
from tinyllama.harness.kernels.chips import processors
from tinyllama.ops import OPS
from tinyllama.ops.rms_norm import kernels


@pytest.mark.parametrize(
    "count", [132, pytest.param(304, marks=pytest.mark.slow("thousands of rows are interpreted"))]
)
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm"])
def test_gains_have_their_gradient_on_many_processors(name: str, count: int) -> None:
    """Of rows that do not divide."""
    op = OPS[name]
    candidate = Candidate(op, op["triton"])
    case_of_16 = next(case for case in candidate.plain_cases() if case.case.dims.get("D") == 16)
    case = replace(case_of_16, case=case_of_16.case.resized(T=16 * count + 5))
    inputs = candidate.inputs(case)
    with processors(count):
        assert processors_of(torch.device("cpu")) == count
        assert kernels.partial_rows(16 * count + 5, torch.device("cpu")) == 2 * count
        wrong = candidate.wrong(case, candidate.results(inputs), inputs)
    assert not wrong, wrong
