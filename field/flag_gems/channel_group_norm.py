"""Group norm of images, with groups of as many channels as the case says."""

from typing import Any

import torch

from field import sampling
from field.flag_gems import kernels
from tinyllama.harness import Case, Op

released = kernels("groupnorm")

channel_group_norm = Op(
    "channel_group_norm",
    inputs=sampling.norm_inputs("B C S", "C"),
    params={"groups": 2, "eps": 1e-5},
    outputs={"y": "B C S"},
    cases=[
        Case(B=2, C=8, S=6),
        Case(B=1, C=4, S=16, why="one image"),
        Case(B=2, C=6, S=5, why="groups of three channels"),
    ],
    fits=lambda dims: "C is no multiple of groups" if dims["C"] % dims["groups"] else None,
    dtypes=(torch.float32,),
)
channel_group_norm.reference(sampling.group_norm)


class GroupNorm(torch.autograd.Function):
    """The two functions, joined as torch's dispatcher joins them."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, groups: int, eps: float
    ) -> torch.Tensor:
        y, mean, rstd = released.group_norm(x, weight, bias, *x.shape, groups, eps)
        ctx.groups = groups
        ctx.save_for_backward(x, weight, mean, rstd)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, mean, rstd = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        gradients = released.group_norm_backward(
            gradients[0], x, mean, rstd, weight, *x.shape, ctx.groups, needed
        )
        return *gradients, None, None


@channel_group_norm.provider("flag_gems", requires=("triton",), double_backward=False)
def flag_gems(
    x_BCS: torch.Tensor, weight_C: torch.Tensor, bias_C: torch.Tensor, groups: int, eps: float
) -> torch.Tensor:
    return GroupNorm.apply(x_BCS, weight_C, bias_C, groups, eps)
