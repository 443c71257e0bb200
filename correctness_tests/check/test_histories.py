"""What calls in a row may not change, keep or depend on, as docs/check.md says. The corpus has the
faults; here each promise has one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from correctness_tests.support.tried import finding, small
from tinyllama.harness import Tensor
from tinyllama.harness.check.run import Finding, Outcome, Rank

ROWS = {"x": Tensor("N D", grad=True), "w": Tensor("D", grad=True)}
Call = Callable[..., Any]
TENSORS: list[torch.Tensor] = []
CACHE: dict[Any, torch.Tensor] = {}


def scaled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * w


class Scaled(torch.autograd.Function):
    """x w, saved as autograd wants it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, w = ctx.saved_tensors
        return dy * w, (dy * x).sum(0)


class UnsafelySaved(Scaled):
    """Autograd does not know what is saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.pair = x, w
        return x * w

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, w = ctx.pair
        return dy * w, (dy * x).sum(0)


class ScaledInPlace(Scaled):
    """Backward uses the memory of the upstream gradient."""

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, w = ctx.saved_tensors
        of_w = (dy * x).sum(0)
        return dy.mul_(w), of_w


def cached_by_address(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    copy = CACHE.setdefault(w.data_ptr(), w.detach().clone())
    return x * (w + (copy - w).detach())


def in_place_without_gradients(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * w if torch.is_grad_enabled() else x.mul_(w).clone()


def seeded(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return x * w


def kept_for_ever(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    TENSORS.append(x * w)
    return TENSORS[-1] * 1


def checked(call: Call, check: str, reference: Call = scaled) -> Finding:
    CACHE.clear()
    try:
        return finding(small("scaled", reference, ROWS, {"y": "N D"}), call, check)
    finally:
        TENSORS.clear()


@pytest.mark.parametrize("check", ["fresh contents", "backward twice", "scaled upstream"])
@pytest.mark.parametrize("call", [scaled, Scaled.apply], ids=["torch", "function"])
def test_a_right_call_is_not_accused(call: Call, check: str) -> None:
    right = checked(call, check)
    assert right.outcome is Outcome.PASSED, right.message


@pytest.mark.parametrize(
    ("call", "check", "rank", "text"),
    [
        (cached_by_address, "fresh contents", Rank.WRONG, "y"),
        (in_place_without_gradients, "fresh contents", Rank.WRONG, "has changed"),
        (seeded, "fresh contents", Rank.UNSAFE, "changes torch's random numbers"),
        (UnsafelySaved.apply, "backward twice", Rank.UNSAFE, "double inputs of A"),
        (ScaledInPlace.apply, "backward twice", Rank.WRONG, "upstream gradient of y has changed"),
        (kept_for_ever, "backward twice", Rank.UNSAFE, "is not released"),
    ],
)
def test_a_history_in_which_a_call_is_wrong_is_named(
    call: Call, check: str, rank: Rank, text: str
) -> None:
    wrong = checked(call, check)
    assert (wrong.outcome, wrong.rank) == (Outcome.FAILED, rank), wrong.message
    assert text in wrong.message
    assert "call " in wrong.message


def test_what_the_reference_does_too_is_no_fault() -> None:
    def view(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape)

    right = checked(view, "fresh contents", reference=lambda x, w: x[:])
    assert right.outcome is not Outcome.FAILED, right.message
