"""Layer norm with a weight and a bias."""

import torch

from field.sampling import ROWS, norm_inputs
from tinyllama.harness import Op
from tinyllama.harness.declare.values import normal
from tinyllama.harness.kernels.foreign import foreign

with foreign():
    from liger_kernel.ops import layer_norm as released

layer_norm = Op(
    "layer_norm",
    inputs=norm_inputs("N D", "D"),
    params={"eps": 1e-5},
    outputs={"y": "N D"},
    cases=ROWS,
    extremes={"far": {"x": normal(1.0, mean=20.0)}},
    dtypes=(torch.float32,),
)


@layer_norm.reference
def eager(
    x_ND: torch.Tensor, weight_D: torch.Tensor, bias_D: torch.Tensor, eps: float
) -> torch.Tensor:
    wide_ND = x_ND.to(torch.promote_types(x_ND.dtype, torch.float32))
    centred_ND = wide_ND - wide_ND.mean(-1, keepdim=True)
    variance_N1 = centred_ND.square().mean(-1, keepdim=True)
    return (centred_ND * (variance_N1 + eps).rsqrt() * weight_D + bias_D).to(x_ND.dtype)


@layer_norm.provider("liger", requires=("triton",), double_backward=False)
def liger(
    x_ND: torch.Tensor, weight_D: torch.Tensor, bias_D: torch.Tensor, eps: float
) -> torch.Tensor:
    return released.LigerLayerNormFunction.apply(x_ND, weight_D, bias_D, eps)
