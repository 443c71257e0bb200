"""RMS norm, gated, and a projection: y = (rms_norm(x) weight silu(gate)) W^T."""

import torch
import torch.nn.functional as F

from field.fla import module
from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.declare.values import normal

released = module("modules.fused_norm_gate")

gated_norm_linear = Op(
    "gated_norm_linear",
    inputs={
        "x": Tensor("N D", grad=True),
        "gate": Tensor("N D", grad=True),
        "weight": Tensor("D", grad=True, values=normal(0.5, mean=1.0)),
        "projection": Tensor("F D", grad=True, values=normal(0.2)),
    },
    params={"eps": 1e-5},
    outputs={"y": "N F"},
    cases=[
        Case(N=6, D=32, F=24),
        Case(N=1, D=64, F=16, why="one row"),
        Case(N=5, D=40, F=8, why="width that no power of two divides"),
    ],
    dtypes=(torch.float32,),
)


@gated_norm_linear.reference
def eager(
    x_ND: torch.Tensor,
    gate_ND: torch.Tensor,
    weight_D: torch.Tensor,
    projection_FD: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    normed_ND = x_ND * (x_ND.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (normed_ND * weight_D * F.silu(gate_ND)) @ projection_FD.T


@gated_norm_linear.provider(
    "fla",
    requires=("triton",),
    double_backward=False,
    races={
        "fused_norm_gate.layer_norm_gated_bwd_kernel": "a block reaches into the rows of the next "
        "program, and both store the same values there"
    },
)
def fla(
    x_ND: torch.Tensor,
    gate_ND: torch.Tensor,
    weight_D: torch.Tensor,
    projection_FD: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    return released.rms_norm_swish_gate_linear(
        x_ND, gate_ND, weight_D, None, projection_FD, None, eps=eps
    )
