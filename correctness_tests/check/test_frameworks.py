"""A captured graph and another stream, simulated on a CPU; and what says nothing of a candidate."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from correctness_tests.corpus.variants import FOLDER, Loaded, findings, variants_of
from correctness_tests.support.captured import RecordedGraph, recording
from correctness_tests.support.tried import MATRIX, finding, small, with_backward
from tinyllama.harness.check import frameworks
from tinyllama.harness.check.run import Outcome, Rank


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


def test_launches_that_cannot_be_recorded_are_blocked(tmp_path: Path) -> None:
    """torch has no autocast for the device of tensors without values."""
    pytest.importorskip("triton")
    variant = variants_of(FOLDER / "linear_under_autocast.py")[0]
    with Loaded(variant, tmp_path) as candidate:
        (answer,) = findings(candidate, ["resources"])
    assert answer.outcome is Outcome.BLOCKED


def test_a_graph_that_breaks_is_a_warning_and_wrong_results_in_one_are_wrong() -> None:
    def broken(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x * weight

    def wrong(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * weight * (1.1 if torch.compiler.is_compiling() else 1.0)

    ranks = [finding(OP, call, "compiled").rank for call in (product, broken, wrong)]
    assert ranks == [None, Rank.WARNING, Rank.WRONG]
