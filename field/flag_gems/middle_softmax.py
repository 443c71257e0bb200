"""Softmax over an axis that is not the last one."""

from typing import Any

import torch

from field.flag_gems import kernels
from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.declare.values import normal

released = kernels("softmax")

middle_softmax = Op(
    "middle_softmax",
    inputs={"x": Tensor("B N K", grad=True)},
    outputs={"y": "B N K"},
    cases=[
        Case(B=2, N=6, K=10),
        Case(B=1, N=16, K=3, why="one block"),
        Case(B=2, N=70, K=5, why="a column that no power of two divides"),
    ],
    extremes={"wide": {"x": normal(10.0)}},
    dtypes=(torch.float32,),
)
middle_softmax.reference(lambda x_BNK: torch.softmax(x_BNK, 1))


@middle_softmax.magnitude
def terms(x: torch.Tensor, upstream: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """dx = y (dy - sum(y dy)); where one y is nearly 1 the two cancel."""
    y, dy = torch.softmax(x, 1), upstream["y"]
    total = (y * dy).square().sum(1, keepdim=True)
    return {"grad x": y * (dy.square() + total).sqrt()}


class Softmax(torch.autograd.Function):
    """The two functions, joined as torch's dispatcher joins them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = released.softmax(x, 1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        (y,) = ctx.saved_tensors
        return released.softmax_backward(gradients[0], y, 1, y.dtype)


@middle_softmax.provider("flag_gems", requires=("triton",), double_backward=False)
def flag_gems(x_BNK: torch.Tensor) -> torch.Tensor:
    return Softmax.apply(x_BNK)
