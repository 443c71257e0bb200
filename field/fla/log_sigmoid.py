"""The logarithm of the sigmoid."""

import torch
import torch.nn.functional as F

from field.fla import module
from tinyllama.harness import Case, Op, Tensor

released = module("modules.activations")

log_sigmoid = Op(
    "log_sigmoid",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N D"},
    cases=[
        Case(N=6, D=32),
        Case(N=1, D=64, why="one row"),
        Case(N=5, D=40, why="width that no power of two divides"),
    ],
    dtypes=(torch.float32,),
)
log_sigmoid.reference(lambda x_ND: F.logsigmoid(x_ND))


@log_sigmoid.provider("fla", requires=("triton",), double_backward=False)
def fla(x_ND: torch.Tensor) -> torch.Tensor:
    return released.logsigmoid(x_ND)
