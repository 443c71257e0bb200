"""RMSNorm in the mode "llama"; out of place in releases that offer it."""

import inspect

import torch

from tinyllama.harness.kernels.foreign import foreign
from tinyllama.ops.rms_norm import rms_norm

with foreign():
    from liger_kernel.ops import rms_norm as released

# The first releases had no choice: they always wrote over the upstream gradient.
_OFFERED = inspect.signature(released.LigerRMSNormFunction.forward).parameters
IN_PLACE = (False,) if "in_place" in _OFFERED else ()


@rms_norm.provider(
    "liger",
    requires=("triton",),
    dtypes=(torch.float32,),
    double_backward=False,
    # Rows are summed one after the other: 1.22 times the bound for 300 rows of huge values.
    slack={torch.float32: 2.0},
)
def liger(x_BTD: torch.Tensor, weight_D: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    apply = released.LigerRMSNormFunction.apply
    return apply(x_BTD, weight_D, eps, 0.0, "llama", *IN_PLACE)
