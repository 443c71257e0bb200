"""RMSNorm in the mode "llama"; out of place in releases that offer it."""

from __future__ import annotations

import inspect

import torch
from liger_kernel.ops import rms_norm as released

from field.liger.device import Scalar, on_cpu
from tinyllama.ops.rms_norm import rms_norm

on_cpu(released)

# The first releases had no choice: they always wrote over the upstream gradient.
_OFFERED = inspect.signature(released.LigerRMSNormFunction.forward).parameters
IN_PLACE = (False,) if "in_place" in _OFFERED else ()


@rms_norm.provider("liger", requires=("triton",), dtypes=(torch.float32,), double_backward=False)
def liger(x_BTD: torch.Tensor, weight_D: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    apply = released.LigerRMSNormFunction.apply
    return apply(x_BTD, weight_D, Scalar(eps), Scalar(0.0), "llama", *IN_PLACE)
