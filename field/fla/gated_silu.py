"""The product of a gate's SiLU and another input."""

import torch

from field.fla import module
from tinyllama.ops.silu_mul import silu_mul

released = module("modules.activations")


@silu_mul.provider("fla", requires=("triton",), dtypes=(torch.float32,), double_backward=False)
def fla(gate_NF: torch.Tensor, up_NF: torch.Tensor) -> torch.Tensor:
    return released.swiglu(gate_NF, up_NF)
