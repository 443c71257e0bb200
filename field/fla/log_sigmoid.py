"""The logarithm of the sigmoid."""

import importlib
import warnings

import torch
import torch.nn.functional as F

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.kernels.foreign import foreign

with foreign(), warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it says that no GPU is there
    released = importlib.import_module("fla.modules.activations")

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


@log_sigmoid.reference
def eager(x_ND: torch.Tensor) -> torch.Tensor:
    return F.logsigmoid(x_ND)


@log_sigmoid.provider("fla", requires=("triton",), double_backward=False)
def fla(x_ND: torch.Tensor) -> torch.Tensor:
    return released.logsigmoid(x_ND)
