"""Rotary embedding of queries and keys, the halves of a head turned against each other."""

import torch

from field.unsloth import kernels
from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.declare.values import Values

released = kernels("rope_embedding")


def _angles(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """One angle for both halves of a head."""
    half = torch.randn((shape[0], shape[1] // 2), generator=generator)
    return torch.cat((half, half), -1)


half_rope = Op(
    "half_rope",
    inputs={
        "q": Tensor("B H T K", grad=True),
        "k": Tensor("B G T K", grad=True),
        "angles": Tensor("T K", values=Values("angles", _angles)),
    },
    outputs={"turned_q": "B H T K", "turned_k": "B G T K"},
    cases=[
        Case(B=2, H=4, G=2, T=3, K=8),
        Case(B=1, H=1, G=1, T=1, K=16, why="one position"),
        Case(B=1, H=3, G=1, T=5, K=12, why="a head that no power of two divides"),
    ],
    fits=lambda dims: "K is odd" if dims["K"] % 2 else "H < G" if dims["H"] < dims["G"] else None,
    dtypes=(torch.float32,),
)


def _turned(x: torch.Tensor, angles_TK: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return x * angles_TK.cos() + torch.cat((-high, low), -1) * angles_TK.sin()


@half_rope.reference
def eager(
    q_BHTK: torch.Tensor, k_BGTK: torch.Tensor, angles_TK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _turned(q_BHTK, angles_TK), _turned(k_BGTK, angles_TK)


@half_rope.provider("unsloth", requires=("triton",), double_backward=False)
def unsloth(
    q_BHTK: torch.Tensor, k_BGTK: torch.Tensor, angles_TK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """With a position for each row, which is the path that turns q and k together."""
    positions = torch.arange(len(angles_TK), dtype=torch.int32).repeat(len(q_BHTK))
    cos, sin = angles_TK.cos().contiguous(), angles_TK.sin().contiguous()
    return released.Fast_RoPE_Embedding_QK.apply(q_BHTK, k_BGTK, cos, sin, positions)
