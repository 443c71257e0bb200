"""Softmax of each row."""

import torch

from field.sampling import ROWS
from tinyllama.harness import Op, Tensor
from tinyllama.harness.declare.values import normal
from tinyllama.harness.kernels.foreign import foreign

with foreign():
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

row_softmax = Op(
    "row_softmax",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N D"},
    cases=ROWS,
    extremes={"wide": {"x": normal(10.0)}},
    dtypes=(torch.float32,),
)
row_softmax.reference(lambda x_ND: torch.softmax(x_ND, -1))


@row_softmax.magnitude(shared=True)
def terms(x: torch.Tensor, upstream: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """dx = y (dy - sum(y dy)); where one y is nearly 1 the two cancel. A row shares its sum."""
    y, dy = torch.softmax(x, -1), upstream["y"]
    total = (y * dy).square().sum(-1, keepdim=True)
    return {"grad x": y * (dy.square() + total).sqrt()}


@row_softmax.provider("liger", requires=("triton",), double_backward=False)
def liger(x_ND: torch.Tensor) -> torch.Tensor:
    return LigerSoftmaxFunction.apply(x_ND)
