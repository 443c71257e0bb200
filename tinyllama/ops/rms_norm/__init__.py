"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight  (Zhang and Sennrich, arXiv 1910.07467)."""

import torch
import torch.nn.functional as F

from tinyllama.harness import Case, Large, Op, Tensor
from tinyllama.harness.declare.autograd import Grads, Named, Needs
from tinyllama.harness.declare.values import normal, scaled_rows
from tinyllama.harness.kernels.layout import as_rows, contiguous
from tinyllama.harness.kernels.precision import compute_dtype
from tinyllama.ops.rms_norm.kernels import (
    launch_backward,
    new_partials,
    norm_backward,
    norm_forward,
    partial_rows,
    sum_rows,
    too_wide,
)

__all__ = ["norm_backward", "norm_forward", "partial_rows", "rms_norm", "sum_rows"]

rms_norm = Op(
    "rms_norm",
    inputs={
        "x": Tensor("B T D", grad=True),
        "weight": Tensor("D", grad=True, values=normal(0.5, mean=1.0)),
    },
    params={"eps": 1e-5},
    outputs={"y": "B T D"},
    leading=("B", "T"),
    instead="without a weight pass ones, for an offset add it to the weight",
    cases=[
        Case(B=2, T=5, D=64),
        Case(B=1, T=1, D=128, why="one row"),
        Case(B=1, T=3, D=100, why="width that no power of two divides"),
        Case(B=3, T=7, D=33, why="ragged everywhere"),
        Case(B=2, T=4, D=1, why="one column"),
        Case(B=1, T=300, D=16, why="many rows: the weight gradient's reduction"),
        Case(B=1, T=41, D=512, why="prefetched tiles, more of them than programs"),
        Case(B=2, T=3, D=64, params={"eps": 0.5}, why="epsilon that dominates"),
        Case(B=(2, 3), T=4, D=40, why="more leading axes"),
        Case(B=(), T=6, D=48, why="a matrix"),
        Case(B=(), T=(), D=72, why="a vector"),
    ],
    timed=[Case(B=4, T=64, D=128), Case(B=8, T=128, D=512), Case(B=8, T=4096, D=4096)],
    extremes={
        "tiny": {"x": normal(1e-3)},
        "huge": {"x": normal(300.0)},
        "rows": {"x": scaled_rows(1e-3, 1e2)},
    },
    bytes={
        "forward": lambda size, B, T, D: (2 * B * T * D + D) * size,
        "backward": lambda size, B, T, D: (3 * B * T * D + 2 * D) * size,
    },
    flops={"forward": lambda B, T, D: 4 * B * T * D, "backward": lambda B, T, D: 8 * B * T * D},
    small_kernels={"sum_kernel": "reads one row for each program of a backward pass"},
)


@rms_norm.reference
def eager(x_BTD: torch.Tensor, weight_D: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """x (... D), weight (D) -> y (... D) in x's dtype; statistics in float32 or wider."""
    wide = x_BTD.to(torch.promote_types(x_BTD.dtype, torch.float32))
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * rstd * weight_D).to(x_BTD.dtype)


# Processes that run the same code differ by 1.4% in device time, and by 7% in host time.
@rms_norm.provider("torch", slowdowns={"device_seconds": 0.04})
def fused(x_BTD: torch.Tensor, weight_D: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """One stock kernel where torch has one, several where it has not."""
    return F.rms_norm(x_BTD, (x_BTD.shape[-1],), weight_D.to(x_BTD.dtype), eps)


@rms_norm.independent("torch.nn.functional.layer_norm of (x, -x)")
def mirrored(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Beside its mirror image x has mean zero, and its variance is the mean of its squares."""
    mirrored = F.layer_norm(torch.cat((x, -x), -1), (2 * x.shape[-1],), eps=eps)
    return mirrored[..., : x.shape[-1]] * weight


@rms_norm.magnitude
def terms(
    x: torch.Tensor, weight: torch.Tensor, eps: float, upstream: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """dx = rstd (w dy - n mean(n w dy)) with n = x rstd; in a narrow row the two cancel."""
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    scaled = upstream["y"] * weight
    n = x * rstd
    mean = (n * scaled).square().mean(-1, keepdim=True).sqrt()
    return {"grad x": rstd * (scaled.square() + (n * mean).square()).sqrt()}


@rms_norm.provider(
    "triton",
    keep=("x", "weight"),
    reads={"x": contiguous, "weight": contiguous},
    saved={"rstd": Tensor("B*T", dtype=torch.float32)},
    requires=("triton",),
    replays=True,
    large=(Large("B", "T*D", {"T": 3, "D": 1000}),),
    supports=too_wide,
)
class Triton:
    """One launch forward, two backward: dx with partial sums of the weight's gradient, and the
    sum of those. Under autocast y has autocast's dtype."""

    @staticmethod
    def forward(
        x: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x_ND = as_rows(x)
        y_ND, rstd_N = norm_forward(x_ND, weight, eps, compute_dtype(x))
        return y_ND.view(x.shape), rstd_N

    @staticmethod
    def backward(grads: Grads, inputs: Named, saved: Named, needs: Needs, eps: float) -> Named:
        x, weight = inputs["x"], inputs["weight"]
        dy_ND, x_ND = as_rows(contiguous(grads[0])), as_rows(x)
        dx = x.new_empty(x.shape) if "x" in needs else None
        partials = new_partials(x_ND) if "weight" in needs else None
        dx_ND = None if dx is None else as_rows(dx)
        launch_backward(dy_ND, x_ND, weight, saved["rstd"], None, dx_ND, None, partials)
        gradients = {} if dx is None else {"x": dx}
        if partials is not None:
            gradients["weight"] = sum_rows(partials, weight.dtype)
        return gradients
