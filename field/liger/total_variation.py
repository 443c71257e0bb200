"""Total variation distance of two distributions, mean over rows."""

import torch

from field.sampling import DISTRIBUTIONS, probabilities
from tinyllama.harness import Op, Tensor
from tinyllama.harness.kernels.foreign import foreign

with foreign():
    from liger_kernel.ops.tvd import LigerTVDLossFunction

total_variation = Op(
    "total_variation",
    inputs={
        "p": Tensor("N V", grad=True, values=probabilities()),
        "q": Tensor("N V", values=probabilities()),
    },
    outputs={"distance": Tensor("", dtype=torch.float32)},
    cases=DISTRIBUTIONS,
    dtypes=(torch.float32,),
)


@total_variation.reference
def eager(p_NV: torch.Tensor, q_NV: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(p_NV.dtype, torch.float32)
    return 0.5 * (p_NV.to(wide) - q_NV.to(wide)).abs().sum() / len(p_NV)


@total_variation.provider("liger", requires=("triton",), double_backward=False)
def liger(p_NV: torch.Tensor, q_NV: torch.Tensor) -> torch.Tensor:
    return LigerTVDLossFunction.apply(p_NV, q_NV, None, "batchmean", -100)
