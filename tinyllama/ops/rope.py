"""Rotary position embedding on consecutive pairs (Su et al., arXiv 2104.09864).

The pair (x[2i], x[2i + 1]) at position t is rotated by the angle t * theta^(-2i / K). The
tables of cosines and sines are inputs: they are made once, in float64, and stay float32.
"""

from __future__ import annotations

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.values import Values, normal

Pair = tuple[torch.Tensor, torch.Tensor]


def rope_tables(
    length: int, head_dim: int, theta: float = 10000.0, dtype: torch.dtype = torch.float32
) -> Pair:
    """cos, sin (T C) for positions 0 to length - 1 and C = head_dim / 2 pairs."""
    exponent_C = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angle_TC = torch.outer(torch.arange(length, dtype=torch.float64), theta**-exponent_C)
    return angle_TC.cos().to(dtype), angle_TC.sin().to(dtype)


def _table(which: int) -> Values:
    def sample(shape: tuple[int, ...], _: torch.Generator) -> torch.Tensor:
        return rope_tables(shape[0], 2 * shape[1], dtype=torch.float64)[which]

    return Values(("cos", "sin")[which], sample)


COS = Tensor("T C", dtype=torch.float32, values=_table(0))
SIN = Tensor("T C", dtype=torch.float32, values=_table(1))


rope = Op(
    "rope",
    inputs={
        "q": Tensor("B T H K", grad=True),
        "k": Tensor("B T G K", grad=True),
        "cos": COS,
        "sin": SIN,
    },
    outputs={"q_rotated": "B T H K", "k_rotated": "B T G K"},
    cases=[
        Case(B=2, T=5, H=4, G=2, K=16, C=8),
        Case(B=1, T=1, H=2, G=1, K=8, C=4, why="position 0 alone: the identity"),
        Case(B=1, T=9, H=1, G=1, K=2, C=1, why="one head, one pair"),
        Case(B=1, T=33, H=3, G=3, K=20, C=10, why="no grouping, ragged head width"),
        Case(B=1, T=257, H=2, G=1, K=8, C=4, why="angles of many turns"),
    ],
    timed=[
        Case(B=4, T=64, H=4, G=2, K=32, C=16),
        Case(B=8, T=128, H=8, G=4, K=64, C=32),
        Case(B=4, T=4096, H=32, G=8, K=128, C=64),
    ],
    extremes={"huge": {"q": normal(300.0), "k": normal(300.0)}},
    bytes={
        "forward": lambda size, B, T, H, G, K, C: 2 * B * T * (H + G) * K * size + 8 * T * C,
        "backward": lambda size, B, T, H, G, K, C: 2 * B * T * (H + G) * K * size + 8 * T * C,
    },
    flops={
        "forward": lambda B, T, H, G, K, C: 6 * B * T * (H + G) * C,
        "backward": lambda B, T, H, G, K, C: 6 * B * T * (H + G) * C,
    },
)


def _rotate(x_BTHK: torch.Tensor, cos_TC: torch.Tensor, sin_TC: torch.Tensor) -> torch.Tensor:
    cos, sin = cos_TC[:, None], sin_TC[:, None]
    even, odd = x_BTHK[..., 0::2], x_BTHK[..., 1::2]
    pairs = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1)
    return pairs.flatten(-2).to(x_BTHK.dtype)


@rope.reference
def eager(
    q_BTHK: torch.Tensor, k_BTGK: torch.Tensor, cos_TC: torch.Tensor, sin_TC: torch.Tensor
) -> Pair:
    """q (B T H K), k (B T G K), tables (T C) -> both rotated, in their own dtype."""
    return _rotate(q_BTHK, cos_TC, sin_TC), _rotate(k_BTGK, cos_TC, sin_TC)


def _rotate_complex(x_BTHK: torch.Tensor, turn_T1C: torch.Tensor) -> torch.Tensor:
    wide = x_BTHK.to(turn_T1C.real.dtype).contiguous()
    pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn_T1C).flatten(-2).to(x_BTHK.dtype)


@rope.provider("torch")
def complex_product(
    q_BTHK: torch.Tensor, k_BTGK: torch.Tensor, cos_TC: torch.Tensor, sin_TC: torch.Tensor
) -> Pair:
    """A rotation is a product with a complex number: one kernel for the arithmetic."""
    turn_T1C = torch.complex(cos_TC, sin_TC)[:, None]
    return _rotate_complex(q_BTHK, turn_T1C), _rotate_complex(k_BTGK, turn_T1C)


@rope.independent("matrix_exp of the rotation's generator")
def exponential(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
    """exp([[0, -a], [a, 0]]) is the rotation by a; the angle is read back from the tables."""
    angle_TC = torch.atan2(sin, cos)
    generator = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=q.dtype, device=q.device)
    turn_TC22 = torch.linalg.matrix_exp(angle_TC[..., None, None] * generator)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("tcij,bthcj->bthci", turn_TC22, x.unflatten(-1, (-1, 2))).flatten(-2)

    return rotate(q), rotate(k)
