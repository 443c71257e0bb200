"""LayerNorm: y = (x - mean) / sqrt(var + eps) * weight + bias  (Ba et al., arXiv 1607.06450)."""

import torch
import torch.nn.functional as F

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.values import normal, scaled_rows

layer_norm = Op(
    "layer_norm",
    inputs={
        "x": Tensor("N D", grad=True),
        "weight": Tensor("D", grad=True, values=normal(0.5, mean=1.0)),
        "bias": Tensor("D", grad=True),
    },
    params={"eps": 1e-5},
    outputs={"y": "N D"},
    cases=[  # the first is also run in every layout: small and general
        Case(N=6, D=64),
        Case(N=1, D=128, why="one row"),
        Case(N=7, D=33, why="ragged everywhere"),
        Case(N=300, D=16, why="many rows: the reduction of the weight's gradient"),
        Case(N=6, D=64, params={"eps": 0.5}, why="epsilon that dominates"),
    ],
    timed=[Case(N=256, D=128), Case(N=1024, D=512), Case(N=32768, D=4096)],
    extremes={"shifted": {"x": normal(1.0, mean=20.0)}, "rows": {"x": scaled_rows(1e-3, 1e2)}},
    bytes={
        "forward": lambda size, N, D: (2 * N * D + 2 * D) * size,
        "backward": lambda size, N, D: (3 * N * D + 3 * D) * size,
    },
    flops={"forward": lambda N, D: 7 * N * D, "backward": lambda N, D: 11 * N * D},
)


@layer_norm.reference  # the provider "eager"; in float64 it is the oracle
def eager(
    x_ND: torch.Tensor, weight_D: torch.Tensor, bias_D: torch.Tensor, eps: float = 1e-5
) -> torch.Tensor:
    """x (N D), weight and bias (D) -> y (N D) in x's dtype; statistics in float32 or wider."""
    wide_ND = x_ND.to(torch.promote_types(x_ND.dtype, torch.float32))
    centred_ND = wide_ND - wide_ND.mean(-1, keepdim=True)
    rstd_N1 = torch.rsqrt(centred_ND.square().mean(-1, keepdim=True) + eps)
    return (centred_ND * rstd_N1 * weight_D + bias_D).to(x_ND.dtype)


@layer_norm.independent("torch.nn.functional.layer_norm")  # checks the reference, in float64
def stock(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


STATISTIC = Tensor("N", dtype=torch.float32)


@layer_norm.provider("manual", keep=("x", "weight"), saved={"mean": STATISTIC, "rstd": STATISTIC})
class Manual:
    """A forward and a backward; launch kernels where these call torch."""

    @staticmethod
    def forward(x, weight, bias, eps):
        """-> the outputs, then the tensors of ``saved``."""
        wide = x.float()
        mean = wide.mean(-1)
        rstd = torch.rsqrt(wide.var(-1, correction=0) + eps)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)  # NaN in tests, until written
        y.copy_((wide - mean[:, None]) * rstd[:, None] * weight + bias)
        return y, mean, rstd

    @staticmethod
    def backward(grads, inputs, saved, needs, eps):
        """grads: one for each output; needs: the inputs whose gradient is wanted."""
        (dy,) = grads
        wide = dy.float()
        n = (inputs["x"].float() - saved["mean"][:, None]) * saved["rstd"][:, None]
        g = wide * inputs["weight"]
        dx = g - g.mean(-1, keepdim=True) - n * (g * n).mean(-1, keepdim=True)
        gradients = {"x": (dx * saved["rstd"][:, None]).to(dy.dtype)}
        if "weight" in needs:
            gradients["weight"] = (wide * n).sum(0).to(dy.dtype)
        if "bias" in needs:
            gradients["bias"] = wide.sum(0).to(dy.dtype)
        return gradients
