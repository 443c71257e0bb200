"""SwiGLU: h = silu(x Wg^T) * (x Wu^T), silu(a) = a sigmoid(a)  (Shazeer, arXiv 2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.values import normal

swiglu = Op(
    "swiglu",
    inputs={
        "x": Tensor("B T D", grad=True),
        "w_gate": Tensor("F D", grad=True, values=normal(0.2)),
        "w_up": Tensor("F D", grad=True, values=normal(0.2)),
    },
    outputs={"h": "B T F"},
    cases=[
        Case(B=2, T=5, D=32, F=48),
        Case(B=1, T=1, D=16, F=33, why="one row, ragged width"),
        Case(B=1, T=130, D=20, F=8, why="many rows: the weight gradients' reduction"),
    ],
    timed=[
        Case(B=4, T=64, D=128, F=256),
        Case(B=8, T=128, D=512, F=2048),
        Case(B=4, T=4096, D=2048, F=8192),
    ],
    extremes={
        "saturated": {"x": normal(50.0)},
        "tiny": {"x": normal(1e-3)},
    },
    bytes={
        "forward": lambda size, B, T, D, F: (B * T * (D + F) + 2 * F * D) * size,
        "backward": lambda size, B, T, D, F: (B * T * (2 * D + 3 * F) + 4 * F * D) * size,
    },
    flops={
        "forward": lambda B, T, D, F: 4 * B * T * D * F + 5 * B * T * F,
        "backward": lambda B, T, D, F: 8 * B * T * D * F + 10 * B * T * F,
    },
)


@swiglu.reference
def eager(x_BTD: torch.Tensor, w_gate_FD: torch.Tensor, w_up_FD: torch.Tensor) -> torch.Tensor:
    """x (B T D), weights (F D) -> h (B T F): two products, silu, multiply."""
    return F.silu(F.linear(x_BTD, w_gate_FD)) * F.linear(x_BTD, w_up_FD)


@swiglu.provider("torch")
def stacked(x_BTD: torch.Tensor, w_gate_FD: torch.Tensor, w_up_FD: torch.Tensor) -> torch.Tensor:
    """One product with the stacked weights: one pass over x, at the price of a copy of W."""
    gate, up = F.linear(x_BTD, torch.cat((w_gate_FD, w_up_FD))).chunk(2, -1)
    return F.silu(gate) * up


@swiglu.independent("torch.nn.functional.glu")
def gated(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor) -> torch.Tensor:
    """glu(a, b) = a sigmoid(b), so silu(g) is glu of g beside itself."""
    gate = x @ w_gate.mT
    return F.glu(torch.cat((gate, gate), -1)) * (x @ w_up.mT)
