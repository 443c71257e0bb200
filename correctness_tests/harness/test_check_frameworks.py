"""A captured graph and another stream, simulated on a CPU; on a GPU the corpus asks the same."""

from contextlib import nullcontext

import pytest
import torch

from correctness_tests.support.captured import RecordedGraph, recording
from correctness_tests.support.tried import MATRIX, finding, small, with_backward
from tinyllama.harness.check import frameworks
from tinyllama.harness.check.run import Outcome


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * weight


OP = small("product", product, {"x": MATRIX, "weight": MATRIX}, {"y": "N D"})
WRONG = with_backward(product, lambda upstream, x, weight: (upstream * weight, upstream * x * 1.1))


@pytest.mark.parametrize("check", ["captured", "side stream"])
def test_results_and_gradients_are_compared(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frameworks, "cannot", lambda *_: None)
    stand_ins = {"Stream": object, "stream": nullcontext, "_sleep": abs, "graph": recording}
    for name, stand_in in {**stand_ins, "CUDAGraph": RecordedGraph}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    assert finding(OP, product, check).outcome is Outcome.PASSED
    assert "grad weight: " in finding(OP, WRONG, check).message
