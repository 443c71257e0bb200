"""Output projection and cross-entropy in one op, so that a provider need not hold all logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.values import normal
from tinyllama.ops import cross_entropy as cross_entropy_file
from tinyllama.ops.cross_entropy import LOSS, TARGETS

linear_cross_entropy = Op(
    "linear_cross_entropy",
    inputs={
        "x": Tensor("N D", grad=True),
        "weight": Tensor("V D", grad=True, values=normal(0.2)),
        "targets": TARGETS,
    },
    outputs={"loss": LOSS},
    cases=[
        Case(N=7, D=32, V=50),
        Case(N=1, D=16, V=64, why="one token"),
        Case(N=65, D=8, V=1000, why="the model's vocabulary, ragged rows"),
    ],
    timed=[Case(N=256, D=128, V=1000), Case(N=1024, D=512, V=1000), Case(N=8192, D=4096, V=32000)],
    extremes={"sharp": {"x": normal(8.0)}, "tiny": {"x": normal(1e-3)}},
    bytes={
        "forward": lambda size, N, D, V: (N + V) * D * size,
        "backward": lambda size, N, D, V: 2 * (N + V) * D * size,
    },
    flops={
        "forward": lambda N, D, V: 2 * N * D * V + 4 * N * V,
        "backward": lambda N, D, V: 4 * N * D * V + 3 * N * V,
    },
)


@linear_cross_entropy.reference
def eager(x_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    """x (N D), weight (V D), targets (N) below V -> the mean loss, a float32 scalar."""
    return cross_entropy_file.eager(F.linear(x_ND, weight_VD), targets_N)


@linear_cross_entropy.provider("torch")
def stock(x_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    return cross_entropy_file.stock(F.linear(x_ND, weight_VD), targets_N)


@linear_cross_entropy.independent("torch.einsum and torch.distributions.Categorical")
def categorical(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy_file.categorical(torch.einsum("nd,vd->nv", x, weight), targets)
