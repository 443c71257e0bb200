"""Every timed call is checked: one that is wrong gives no time.

The faults come after a right first call, which is the one that a quick check would look at.
"""

from typing import Any

import pytest
import torch

from correctness_tests.support.contenders import (
    Call,
    Contender,
    contender_fixture,  # noqa: F401
    weighed,
)
from tinyllama.harness.measure.op_contender import FORWARD
from tinyllama.harness.measure.right_results import WrongResultError
from tinyllama.ops import OPS


def after_the_first(wrong: Call) -> Call:
    """Right once, then with a fault; ``wrong`` also gets the outputs of the first call."""
    first: list[torch.Tensor] = []

    def call(x: torch.Tensor, weight: torch.Tensor) -> Any:
        if not first:
            first.append(weighed(x, weight).detach().clone())
            return weighed(x, weight)
        return wrong(x, weight, first[0])

    return call


def with_row_gradient(x: torch.Tensor, row: int, factor: float) -> torch.Tensor:
    """The same values, with the gradient of one row scaled."""
    scale = torch.ones_like(x[:, :1])
    scale[row] = factor
    return x.detach() + (x - x.detach()) * scale


def overwritten(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Its inputs are scratch memory to it; what it returns fits them."""
    x.detach().zero_()
    return weighed(x, weight)


LATER: dict[str, Call] = {
    "zeros": lambda x, w, first: weighed(x, w) * 0,
    "first_outputs_again": lambda x, w, first: first + weighed(x, w) - weighed(x, w).detach(),
    "all_but_the_last_row": lambda x, w, first: torch.cat((weighed(x, w)[:-1], 0 * x[-1:])),
    "one_row_as_first": lambda x, w, first: torch.cat((first[:1], weighed(x, w)[1:])),
    "nan": lambda x, w, first: weighed(x, w) + torch.where(x == x.max(), torch.nan, 0.0),
    "rows_swapped": lambda x, w, first: weighed(x.flip(0), w),
    "row_of_grad_x_lost": lambda x, w, first: weighed(with_row_gradient(x, 5, 0.0), w),
    "row_of_grad_x_doubled": lambda x, w, first: weighed(with_row_gradient(x, 5, 2.0), w),
    "grad_weight_lost": lambda x, w, first: weighed(x, w.detach()),
    "grad_weight_zero": lambda x, w, first: weighed(x, w.detach() + 0 * (w - w.detach())),
    "inputs_overwritten": lambda x, w, first: overwritten(x, w),
}


@pytest.mark.parametrize(
    ("fault", "dtype"), [(name, ("fp32", "bf16")[i % 2]) for i, name in enumerate(LATER)]
)
def test_a_fault_after_a_right_first_call_gives_no_time(
    contender: Contender, fault: str, dtype: str
) -> None:
    faulty = contender(after_the_first(LATER[fault]), dtype=dtype)
    with pytest.raises(WrongResultError):
        faulty.turn()


def test_a_fault_that_comes_late_is_found_when_it_comes(contender: Contender) -> None:
    factor = 1.0
    faulty = contender(lambda x, weight: weighed(x, weight) * factor)
    for _ in range(3):
        faulty.turn()
    factor = 1.001
    with pytest.raises(WrongResultError, match=r"a timed call: y: error .* in a row"):
        faulty.turn()


def test_a_wrong_first_call_is_found_before_anything_is_timed(contender: Contender) -> None:
    with pytest.raises(WrongResultError, match="weigh_rows-tried-N16D64-fp32: y: at "):
        contender(lambda x, weight: weighed(x, weight) * 1.001)


class _Overwriting(torch.autograd.Function):
    """Right, but its backward leaves x scaled."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (dy,), (x, weight) = grads, ctx.saved_tensors
        dweight = (dy * x).sum(0)
        x.data.mul_(2)
        return dy * weight, dweight


def test_inputs_are_overwritten_by_no_backward_that_does_not_say_so(contender: Contender) -> None:
    for said in ((), ("weight",)):
        with pytest.raises(AssertionError, match="backward changed its input x"):
            contender(_Overwriting.apply, overwrites=said)
    says = contender(_Overwriting.apply, overwrites=("x",))
    for _ in range(3):
        assert set(says.turn()) == set(says.passes)
    with pytest.raises(AssertionError, match="forward changed its input x"):
        contender(overwritten, overwrites=("x",))


@pytest.mark.long
@pytest.mark.parametrize("left_out", ["one_moment", "step"])
def test_an_op_in_place_is_checked_by_what_it_wrote(contender: Contender, left_out: str) -> None:
    eager = OPS["adamw"]["eager"].call
    faults = False

    def call(*args: Any, **params: Any) -> None:
        _, _, exp_avg, _, step, _ = args
        forgotten = {
            "one_moment": [exp_avg[0]],
            "step": [step],
        }[left_out]
        before = [tensor.clone() for tensor in forgotten]
        eager(*args, **params)
        if faults:
            for tensor, old in zip(forgotten, before, strict=True):
                tensor.copy_(old)

    faulty = contender(call, "adamw")
    assert list(faulty.turn()) == [FORWARD]
    faults = True
    with pytest.raises(WrongResultError):
        faulty.turn()
