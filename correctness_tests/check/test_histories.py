"""What calls in a row may not change, as docs/check.md says. The corpus has the faults; these are
what no variant of it shows."""

from typing import Any

import torch

from correctness_tests.support.tried import finding, small
from tinyllama.harness import Tensor
from tinyllama.harness.check.run import Outcome, Rank

ROWS = {"x": Tensor("N D", grad=True), "w": Tensor("D", grad=True)}


class ScaledInPlace(torch.autograd.Function):
    """Right, but its backward uses the memory of the upstream gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, w = ctx.saved_tensors
        of_w = (dy * x).sum(0)
        return dy.mul_(w), of_w


def test_a_backward_that_writes_its_upstream_gradient_is_wrong() -> None:
    op = small("scaled", lambda x, w: x * w, ROWS, {"y": "N D"})
    wrong = finding(op, ScaledInPlace.apply, "backward twice")
    assert (wrong.outcome, wrong.rank) == (Outcome.FAILED, Rank.WRONG), wrong.message
    assert "upstream gradient of y" in wrong.message


def test_what_the_reference_does_too_is_no_fault() -> None:
    op = small("first", lambda x, w: x[:], ROWS, {"y": "N D"})
    right = finding(op, lambda x, w: x.view(x.shape), "fresh contents")
    assert right.outcome is not Outcome.FAILED, right.message
