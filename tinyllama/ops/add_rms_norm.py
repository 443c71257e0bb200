"""Residual addition and RMSNorm in one op: both the sum and its norm are results.

sum = x + residual, y = rms_norm(sum). Either upstream gradient may be absent: the last
sum of a model feeds only a norm.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.values import normal, scaled_rows
from tinyllama.ops import rms_norm as rms_norm_file

Pair = tuple[torch.Tensor, torch.Tensor]

add_rms_norm = Op(
    "add_rms_norm",
    inputs={
        "x": Tensor("B T D", grad=True),
        "residual": Tensor("B T D", grad=True),
        "weight": Tensor("D", grad=True, values=normal(0.5, mean=1.0)),
    },
    params={"eps": 1e-5},
    outputs={"y": "B T D", "sum": "B T D"},
    cases=[
        Case(B=2, T=5, D=64),
        Case(B=1, T=1, D=128, why="one row"),
        Case(B=1, T=3, D=100, why="width that no power of two divides"),
        Case(B=1, T=300, D=16, why="many rows: the weight gradient's reduction"),
        Case(B=2, T=3, D=64, params={"eps": 0.5}, why="epsilon that dominates"),
    ],
    timed=[Case(B=4, T=64, D=128), Case(B=8, T=128, D=512), Case(B=8, T=4096, D=4096)],
    extremes={
        "tiny": {"x": normal(1e-3), "residual": normal(1e-3)},
        "huge": {"x": normal(300.0), "residual": normal(300.0)},
        "rows": {"x": scaled_rows(1e-3, 1e2), "residual": scaled_rows(1e-3, 1e2)},
    },
    bytes={
        "forward": lambda size, B, T, D: (4 * B * T * D + D) * size,
        "backward": lambda size, B, T, D: (4 * B * T * D + 2 * D) * size,
    },
    flops={
        "forward": lambda B, T, D: 5 * B * T * D,
        "backward": lambda B, T, D: 9 * B * T * D,
    },
)


@add_rms_norm.reference
def eager(
    x_BTD: torch.Tensor, residual_BTD: torch.Tensor, weight_D: torch.Tensor, eps: float = 1e-5
) -> Pair:
    """x, residual (B T D), weight (D) -> y, sum (B T D)."""
    total_BTD = x_BTD + residual_BTD
    return rms_norm_file.eager(total_BTD, weight_D, eps), total_BTD


@add_rms_norm.provider("torch")
def fused(
    x_BTD: torch.Tensor, residual_BTD: torch.Tensor, weight_D: torch.Tensor, eps: float = 1e-5
) -> Pair:
    total_BTD = x_BTD + residual_BTD
    return rms_norm_file.fused(total_BTD, weight_D, eps), total_BTD


@add_rms_norm.independent("torch.add and torch.nn.functional.rms_norm")
def stock(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Pair:
    total = torch.add(x, residual)
    return F.rms_norm(total, (x.shape[-1],), weight, eps), total
