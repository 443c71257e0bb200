"""Causal grouped-query attention: o = softmax(q k^T / sqrt(K) + mask) v.

Query head h reads key/value head h // (H / G)  (Ainslie et al., arXiv 2305.13245).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.values import normal

# On a GPU its fp32 kernel makes each product of three tf32 ones: errors up to 8.4 times what is
# otherwise allowed were seen on an H200, with keys far from zero (docs/LOG.md).
SDPA_SLACK = {torch.float32: 12.0}

attention = Op(
    "attention",
    inputs={
        "q": Tensor("B T H K", grad=True),
        "k": Tensor("B T G K", grad=True),
        "v": Tensor("B T G K", grad=True),
    },
    outputs={"o": "B T H K"},
    cases=[
        Case(B=2, T=17, H=4, G=2, K=16),
        Case(B=1, T=1, H=2, G=1, K=16, why="one token: the query's gradient is exactly zero"),
        Case(B=1, T=2, H=1, G=1, K=16, why="one head"),
        Case(B=1, T=33, H=6, G=2, K=32, why="three query heads a group; 32 + 1 tokens"),
        Case(B=1, T=31, H=4, G=4, K=64, why="no grouping; 32 - 1 tokens"),
        Case(B=1, T=130, H=2, G=1, K=16, why="several blocks of any kernel"),
    ],
    timed=[
        Case(B=4, T=64, H=4, G=2, K=32),
        Case(B=8, T=128, H=8, G=4, K=64),
        Case(B=1, T=4096, H=32, G=8, K=128),
    ],
    extremes={
        "peaked": {"q": normal(3.0), "k": normal(3.0)},
        "flat": {"q": normal(1e-3), "k": normal(1e-3)},
        "shifted": {"k": normal(1.0, mean=20.0)},
    },
    bytes={
        "forward": lambda size, B, T, H, G, K: 2 * B * T * (H + G) * K * size,
        "backward": lambda size, B, T, H, G, K: 4 * B * T * (H + G) * K * size,
    },
    flops={  # causal: half of the T x T products; 2 products forward, 5 backward
        "forward": lambda B, T, H, G, K: 2 * B * H * T * (T + 1) * K,
        "backward": lambda B, T, H, G, K: 5 * B * H * T * (T + 1) * K,
    },
)


def _causal_mask(length: int, device: torch.device) -> torch.Tensor:
    """True above the diagonal (T T): the positions a token must not see."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)


@attention.reference
def eager(q_BTHK: torch.Tensor, k_BTGK: torch.Tensor, v_BTGK: torch.Tensor) -> torch.Tensor:
    """q (B T H K), k and v (B T G K) -> o (B T H K); the T x T scores are materialised."""
    groups = q_BTHK.shape[2] // k_BTGK.shape[2]
    q_BHTK = q_BTHK.transpose(1, 2)
    k_BHTK = k_BTGK.transpose(1, 2).repeat_interleave(groups, dim=1)
    v_BHTK = v_BTGK.transpose(1, 2).repeat_interleave(groups, dim=1)
    scores_BHTT = q_BHTK @ k_BHTK.transpose(-2, -1) * q_BTHK.shape[-1] ** -0.5
    scores_BHTT = scores_BHTT.masked_fill(
        _causal_mask(q_BTHK.shape[1], q_BTHK.device), float("-inf")
    )
    wide = torch.promote_types(scores_BHTT.dtype, torch.float32)
    weights_BHTT = torch.softmax(scores_BHTT, -1, dtype=wide).to(v_BHTK.dtype)
    return (weights_BHTT @ v_BHTK).transpose(1, 2)


@attention.provider(
    "torch",
    deterministic=frozenset({"cpu"}),
    double_backward=False,
    slack=SDPA_SLACK,
)
def sdpa(q_BTHK: torch.Tensor, k_BTGK: torch.Tensor, v_BTGK: torch.Tensor) -> torch.Tensor:
    """Stock fused attention; its CUDA backward adds with atomics, so bits may differ.

    The fused kernels for 16-bit inputs read grouped heads in place; those for wider inputs
    do not, and would fall back to materialised scores, so K and V are expanded for them.
    """
    q_BHTK, k_BGTK, v_BGTK = (x.transpose(1, 2) for x in (q_BTHK, k_BTGK, v_BTGK))
    grouped = q_BTHK.dtype in (torch.bfloat16, torch.float16)
    if not grouped:
        groups = q_BTHK.shape[2] // k_BTGK.shape[2]
        k_BGTK = k_BGTK.repeat_interleave(groups, dim=1)
        v_BGTK = v_BGTK.repeat_interleave(groups, dim=1)
    o_BHTK = F.scaled_dot_product_attention(
        q_BHTK, k_BGTK, v_BGTK, is_causal=True, enable_gqa=grouped
    )
    return o_BHTK.transpose(1, 2)


@attention.independent("torch.nn.functional.multi_head_attention_forward")
def multi_head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The classic module with identity projections, on heads that are written out."""
    length, heads, width = q.shape[1:]
    groups = heads // k.shape[2]
    flat_q = q.flatten(2).transpose(0, 1)
    flat_k, flat_v = (x.repeat_interleave(groups, 2).flatten(2).transpose(0, 1) for x in (k, v))
    identity = torch.eye(heads * width, dtype=q.dtype, device=q.device)
    out, _ = F.multi_head_attention_forward(
        flat_q,
        flat_k,
        flat_v,
        embed_dim_to_check=heads * width,
        num_heads=heads,
        in_proj_weight=None,
        in_proj_bias=None,
        bias_k=None,
        bias_v=None,
        add_zero_attn=False,
        dropout_p=0.0,
        out_proj_weight=identity,
        out_proj_bias=None,
        attn_mask=_causal_mask(length, q.device),
        use_separate_proj_weight=True,
        q_proj_weight=identity,
        k_proj_weight=identity,
        v_proj_weight=identity,
    )
    return out.transpose(0, 1).unflatten(-1, (heads, width))


@attention.magnitude
def terms(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, upstream: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Root sum of squares of the terms of dq and dk, where dS = P (dP - sum(P dP)) cancels."""
    groups = q.shape[2] // k.shape[2]
    q, do = q.transpose(1, 2), upstream["o"].transpose(1, 2)
    k, v = (x.transpose(1, 2).repeat_interleave(groups, 1) for x in (k, v))
    scale = q.shape[-1] ** -0.5
    scores = (q @ k.mT * scale).masked_fill(_causal_mask(q.shape[2], q.device), float("-inf"))
    p = torch.softmax(scores, -1)
    dp2 = do.square() @ v.square().mT
    ds2 = p.square() * (dp2 + (p.square() * dp2).sum(-1, keepdim=True))
    dk2 = (ds2.mT @ q.square()).unflatten(1, (-1, groups)).sum(2)
    return {
        "grad q": scale * (ds2 @ k.square()).sqrt().transpose(1, 2),
        "grad k": scale * dk2.sqrt().transpose(1, 2),
    }
