"""The query, key and value projections of one input."""

import torch
import torch.nn.functional as F

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.declare.values import normal

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

qkv = Op(
    "qkv",
    inputs={
        "x": Tensor("B T D", grad=True),
        "w_q": Tensor("Q D", grad=True, values=normal(0.1)),
        "w_k": Tensor("R D", grad=True, values=normal(0.1)),
        "w_v": Tensor("R D", grad=True, values=normal(0.1)),
    },
    outputs={"q": "B T Q", "k": "B T R", "v": "B T R"},
    cases=[
        Case(B=2, T=5, D=32, Q=32, R=16),
        Case(B=1, T=1, D=48, Q=24, R=8, why="one row"),
        Case(B=1, T=63, D=20, Q=20, R=20, why="no grouping, ragged"),
    ],
    timed=[
        Case(B=4, T=64, D=128, Q=128, R=64),
        Case(B=8, T=128, D=512, Q=512, R=256),
        Case(B=4, T=4096, D=2048, Q=2048, R=512),
    ],
    extremes={"tiny": {"x": normal(1e-3)}},
    bytes={
        "forward": lambda size, B, T, D, Q, R: (
            (B * T + Q + 2 * R) * D * size + B * T * (Q + 2 * R) * size
        ),
        "backward": lambda size, B, T, D, Q, R: (
            2 * (B * T + Q + 2 * R) * D * size + B * T * (Q + 2 * R) * size
        ),
    },
    flops={
        "forward": lambda B, T, D, Q, R: 2 * B * T * D * (Q + 2 * R),
        "backward": lambda B, T, D, Q, R: 4 * B * T * D * (Q + 2 * R),
    },
)


@qkv.reference
def eager(
    x_BTD: torch.Tensor, w_q_QD: torch.Tensor, w_k_RD: torch.Tensor, w_v_RD: torch.Tensor
) -> Three:
    """x (B T D) and weights (out D) -> q (B T Q), k and v (B T R): three products."""
    return F.linear(x_BTD, w_q_QD), F.linear(x_BTD, w_k_RD), F.linear(x_BTD, w_v_RD)


@qkv.provider("torch")
def stacked(
    x_BTD: torch.Tensor, w_q_QD: torch.Tensor, w_k_RD: torch.Tensor, w_v_RD: torch.Tensor
) -> Three:
    """One product with the stacked weights: one pass over x, at the price of a copy of W."""
    out = F.linear(x_BTD, torch.cat((w_q_QD, w_k_RD, w_v_RD)))
    q, k, v = out.split((w_q_QD.shape[0], w_k_RD.shape[0], w_v_RD.shape[0]), -1)
    return q, k, v


@qkv.independent("torch.einsum")
def contraction(x: torch.Tensor, w_q: torch.Tensor, w_k: torch.Tensor, w_v: torch.Tensor) -> Three:
    q, k, v = (torch.einsum("btd,od->bto", x, w) for w in (w_q, w_k, w_v))
    return q, k, v
