"""Group norm of images: mean and variance over groups of channels, a weight for each channel."""

import torch

from field import sampling
from tinyllama.harness import Case, Op
from tinyllama.harness.kernels.foreign import foreign

with foreign():
    from liger_kernel.ops import group_norm as released

group_norm = Op(
    "group_norm",
    inputs=sampling.norm_inputs("B C H W", "C"),
    params={"groups": 2, "eps": 1e-6},
    outputs={"y": "B C H W"},
    cases=[Case(B=2, C=4, H=3, W=5), Case(B=1, C=6, H=1, W=8, why="one row of an image")],
    dtypes=(torch.float32,),
)
group_norm.reference(sampling.group_norm)


@group_norm.provider("liger", requires=("triton",), double_backward=False)
def liger(
    x_BCHW: torch.Tensor, weight_C: torch.Tensor, bias_C: torch.Tensor, groups: int, eps: float
) -> torch.Tensor:
    apply = released.LigerGroupNormFunction.apply
    return apply(x_BCHW, weight_C, bias_C, len(weight_C), groups, eps)
