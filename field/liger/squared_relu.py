"""The square of the positive part."""

import torch

from field.sampling import ROWS
from tinyllama.harness import Op, Tensor
from tinyllama.harness.kernels.foreign import foreign

with foreign():
    from liger_kernel.ops.relu_squared import LigerReLUSquaredFunction

squared_relu = Op(
    "squared_relu",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N D"},
    cases=ROWS,
    dtypes=(torch.float32,),
)
squared_relu.reference(lambda x_ND: torch.relu(x_ND).square())


@squared_relu.provider("liger", requires=("triton",), double_backward=False)
def liger(x_ND: torch.Tensor) -> torch.Tensor:
    return LigerReLUSquaredFunction.apply(x_ND)
