"""Layer norm of sequences, over their last axis."""

from typing import Any

import torch

from field import sampling
from field.flag_gems import kernels
from tinyllama.harness import Case, Op

released = kernels("layernorm")

sequence_layer_norm = Op(
    "sequence_layer_norm",
    inputs=sampling.norm_inputs("B T D", "D"),
    params={"eps": 1e-5},
    outputs={"y": "B T D"},
    cases=[
        Case(B=2, T=3, D=16),
        Case(B=3, T=1, D=40, why="one position, and a width that no power of two divides"),
    ],
    dtypes=(torch.float32,),
)
sequence_layer_norm.reference(sampling.layer_norm)


class LayerNorm(torch.autograd.Function):
    """The two functions, joined as torch's dispatcher joins them."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
    ) -> torch.Tensor:
        y, mean, rstd = released.layer_norm(x, weight.shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        gradients = released.layer_norm_backward(
            gradients[0], x, weight.shape, mean, rstd, weight, bias, needed
        )
        return *gradients, None


@sequence_layer_norm.provider("flag_gems", requires=("triton",), double_backward=False)
def flag_gems(
    x_BTD: torch.Tensor, weight_D: torch.Tensor, bias_D: torch.Tensor, eps: float
) -> torch.Tensor:
    return LayerNorm.apply(x_BTD, weight_D, bias_D, eps)
