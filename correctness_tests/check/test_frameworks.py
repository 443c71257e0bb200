"""What torch's compiler and autocast make of a candidate, and what says nothing of it."""

from pathlib import Path

import pytest
import torch

from correctness_tests.corpus.variants import FOLDER, Loaded, findings, variants_of
from correctness_tests.support.tried import MATRIX, finding, small
from tinyllama.harness.check.run import Outcome, Rank


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * weight


OP = small("product", product, {"x": MATRIX, "weight": MATRIX}, {"y": "N D"})


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
