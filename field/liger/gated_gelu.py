"""The product of a gate's GELU and another input; backward writes over what forward saved."""

import torch
import torch.nn.functional as F

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.kernels.foreign import foreign

with foreign():
    from liger_kernel.ops.geglu import LigerGELUMulFunction

gated_gelu = Op(
    "gated_gelu",
    inputs={"gate": Tensor("N F", grad=True), "up": Tensor("N F", grad=True)},
    outputs={"h": "N F"},
    cases=[
        Case(N=4, F=64),
        Case(N=1, F=16, why="one row"),
        Case(N=3, F=100, why="width that no power of two divides"),
    ],
    dtypes=(torch.float32,),
)
gated_gelu.reference(lambda gate_NF, up_NF: F.gelu(gate_NF, approximate="tanh") * up_NF)


@gated_gelu.provider(
    "liger", requires=("triton",), double_backward=False, overwrites=("gate", "up")
)
def liger(gate_NF: torch.Tensor, up_NF: torch.Tensor) -> torch.Tensor:
    return LigerGELUMulFunction.apply(gate_NF, up_NF)
