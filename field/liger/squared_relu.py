"""The square of the positive part."""

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.kernels.foreign import foreign

with foreign():
    from liger_kernel.ops.relu_squared import LigerReLUSquaredFunction

squared_relu = Op(
    "squared_relu",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N D"},
    cases=[
        Case(N=4, D=64),
        Case(N=1, D=128, why="one row"),
        Case(N=3, D=100, why="width that no power of two divides"),
    ],
    dtypes=(torch.float32,),
)


@squared_relu.reference
def eager(x_ND: torch.Tensor) -> torch.Tensor:
    return torch.relu(x_ND).square()


@squared_relu.provider("liger", requires=("triton",), double_backward=False)
def liger(x_ND: torch.Tensor) -> torch.Tensor:
    return LigerReLUSquaredFunction.apply(x_ND)
