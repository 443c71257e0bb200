"""Liger-Kernel's kernels as providers of our ops, to be timed beside ours (extra ``peers``).

Its rotary embedding is not among them: it rotates halves of a head, ours consecutive pairs.
This is a file of providers like any other (``--ops FILE``). They are held to the same bound as
ours, with the slack declared here; one that exceeds it has no time, and its entry says so.
Its losses count the targets on the host, so their calls wait for the device.
"""

import functools
import importlib
from typing import Any

import torch
import torch.nn.functional as F

from tinyllama.ops.add_rms_norm import add_rms_norm
from tinyllama.ops.cross_entropy import NO_TARGET, cross_entropy
from tinyllama.ops.linear_cross_entropy import linear_cross_entropy
from tinyllama.ops.rms_norm import rms_norm
from tinyllama.ops.silu_mul import silu_mul
from tinyllama.ops.swiglu import swiglu

NEEDS = ("gpu", "module liger_kernel")


@functools.cache
def _function(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name)


@rms_norm.provider("liger", requires=NEEDS, double_backward=False)
def liger_rms_norm(x_BTD: torch.Tensor, weight_D: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """In its "llama" mode; not in place, which would overwrite the upstream gradient."""
    apply = _function("rms_norm", "LigerRMSNormFunction").apply
    return apply(x_BTD, weight_D, eps, 0.0, "llama", False)


@add_rms_norm.provider("liger", requires=NEEDS, double_backward=False)
def liger_add_rms_norm(
    x_BTD: torch.Tensor, residual_BTD: torch.Tensor, weight_D: torch.Tensor, eps: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor]:
    """In the mode of its RMSNorm."""
    apply = _function("fused_add_rms_norm", "LigerFusedAddRMSNormFunction").apply
    y_BTD, sum_BTD = apply(x_BTD, residual_BTD, weight_D, eps, 0.0, "llama", False)
    return y_BTD, sum_BTD


@silu_mul.provider("liger", requires=NEEDS, double_backward=False, overwrites=("gate", "up"))
def liger_silu_mul(gate_NF: torch.Tensor, up_NF: torch.Tensor) -> torch.Tensor:
    """Its backward writes the gradients over gate and up: in a model nobody reads these again."""
    return _function("swiglu", "LigerSiLUMulFunction").apply(gate_NF, up_NF)


@swiglu.provider("liger", requires=NEEDS, double_backward=False)
def liger_swiglu(
    x_BTD: torch.Tensor, w_gate_FD: torch.Tensor, w_up_FD: torch.Tensor
) -> torch.Tensor:
    """Its activation behind torch's products."""
    return liger_silu_mul(F.linear(x_BTD, w_gate_FD), F.linear(x_BTD, w_up_FD))


@cross_entropy.provider("liger", requires=NEEDS, double_backward=False, waits=True)
def liger_cross_entropy(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    ignore_index: int | None = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """It writes the gradient over the logits, so it is given a copy; the copy is timed too."""
    apply = _function("cross_entropy", "LigerCrossEntropyFunction").apply
    ignored = NO_TARGET if ignore_index is None else ignore_index
    result = apply(logits_NV.clone(), targets_N, None, ignored, 0.0, 0.0, reduction)
    return (result[0] if isinstance(result, tuple) else result).float()


@linear_cross_entropy.provider("liger", requires=NEEDS, double_backward=False, waits=True)
def liger_linear_cross_entropy(
    x_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_N: torch.Tensor,
    ignore_index: int | None = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """The fused product and loss; its gradients are accumulated in the inputs' dtype."""
    module = "fused_linear_cross_entropy"
    ignored = NO_TARGET if ignore_index is None else ignore_index
    result = _function(module, "LigerFusedLinearCrossEntropyFunction").apply(
        x_ND, weight_VD, targets_N, None, None, ignored, 0.0, 0.0, reduction
    )
    return (result[0] if isinstance(result, tuple) else result).float()
