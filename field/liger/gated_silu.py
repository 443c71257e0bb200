"""The product of a gate's SiLU and another input; backward writes over what forward saved."""

import torch

from tinyllama.harness.kernels.foreign import foreign
from tinyllama.ops.silu_mul import silu_mul

with foreign():
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction


@silu_mul.provider(
    "liger",
    requires=("triton",),
    dtypes=(torch.float32,),
    double_backward=False,
    overwrites=("gate", "up"),
)
def liger(gate_NF: torch.Tensor, up_NF: torch.Tensor) -> torch.Tensor:
    return LigerSiLUMulFunction.apply(gate_NF, up_NF)
