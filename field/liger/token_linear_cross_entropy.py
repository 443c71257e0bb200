"""Output projection and cross-entropy of each token: ``reduction="none"``, fused."""

import torch
import torch.nn.functional as F

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.declare.values import normal
from tinyllama.harness.kernels.foreign import foreign
from tinyllama.ops.cross_entropy import TARGETS

with foreign():
    from liger_kernel.ops import fused_linear_cross_entropy as released

token_linear_cross_entropy = Op(
    "token_linear_cross_entropy",
    inputs={
        "x": Tensor("N D", grad=True),
        "weight": Tensor("V D", grad=True, values=normal(0.2)),
        "targets": TARGETS,
    },
    outputs={"losses": Tensor("N", dtype=torch.float32)},
    cases=[
        Case(N=6, D=16, V=50),
        Case(N=1, D=8, V=64, why="one token"),
        Case(N=5, D=8, V=1000, why="a row that does not fill its block"),
    ],
    dtypes=(torch.float32,),
)


@token_linear_cross_entropy.reference
def eager(x_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    logits_NV = F.linear(x_ND, weight_VD)
    true_N = logits_NV.gather(-1, targets_N[:, None])[:, 0]
    return logits_NV.logsumexp(-1) - true_N


@token_linear_cross_entropy.provider(
    "liger", requires=("triton",), double_backward=False, waits=True
)
def liger(x_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    apply = released.LigerFusedLinearCrossEntropyFunction.apply
    return apply(x_ND, weight_VD, targets_N, None, None, -100, 0.0, 0.0, "none")[0]
