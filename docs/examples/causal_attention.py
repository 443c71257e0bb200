"""Causal attention with FlashAttention's backward pass (Dao et al., arXiv 2205.14135), in eager
torch: terms that cancel, and how an op declares their magnitude.

    python -m tinyllama check docs/examples/causal_attention.py
"""

import math
from typing import Any

import torch

from tinyllama.harness import Case, Op, Tensor

causal_attention = Op(
    "causal_attention",
    inputs={name: Tensor("B H T K", grad=True) for name in ("q", "k", "v")},
    outputs={"o": "B H T K"},
    cases=[Case(B=1, H=2, T=33, K=16), Case(B=2, H=1, T=64, K=32)],
)


def hidden(q: torch.Tensor) -> torch.Tensor:
    """Which keys a query does not see (T T)."""
    T = q.shape[2]
    return torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)


@causal_attention.reference
def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden(q), -math.inf)
    return scores.softmax(-1) @ v


class Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q.float() @ k.float().mT * q.shape[-1] ** -0.5
        scores = scores.masked_fill(hidden(q), -math.inf)
        largest = scores.amax(-1, keepdim=True)
        p = torch.exp(scores - largest)
        total = p.sum(-1, keepdim=True)
        o = (p.to(v.dtype).float() @ v.float() / total).to(q.dtype)
        ctx.save_for_backward(q, k, v, o, largest + torch.log(total))
        return o

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: torch.Tensor) -> tuple[torch.Tensor, ...]:
        dtype, scale = do.dtype, do.shape[-1] ** -0.5
        q, k, v, o, lse = (x.float() for x in ctx.saved_tensors)
        do = do.float()
        p = torch.exp((q @ k.mT * scale).masked_fill(hidden(q), -math.inf) - lse)
        delta = (o * do).sum(-1, keepdim=True)  # eager has sum(P dP) here
        ds = (p * (do @ v.mT - delta)).to(dtype).float() * scale
        dv = p.to(dtype).float().mT @ do
        return (ds @ k).to(dtype), (ds.mT @ q).to(dtype), dv.to(dtype)


@causal_attention.provider("flash", double_backward=False)
def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = Flash.apply(q, k, v)
    return found


@causal_attention.magnitude
def terms(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, upstream: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Root sum of squares of the terms of dq and dk: dS = P (dP - sum(P dP)) cancels. For a query
    with one key it is exactly zero in eager, and the rounding of a sum where delta is o do."""
    scale = q.shape[-1] ** -0.5
    p = (q @ k.mT * scale).masked_fill(hidden(q), -math.inf).softmax(-1)
    dp2 = upstream["o"].square() @ v.square().mT
    ds2 = p.square() * (dp2 + (p.square() * dp2).sum(-1, keepdim=True))
    return {
        "grad q": scale * (ds2 @ k.square()).sqrt(),
        "grad k": scale * (ds2.mT @ q.square()).sqrt(),
    }
