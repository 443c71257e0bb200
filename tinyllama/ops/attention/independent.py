"""What attention is held to beside its reference: other code, and the magnitude of its terms."""

import torch
import torch.nn.functional as F


def causal_mask(length: int, device: torch.device) -> torch.Tensor:
    """True above the diagonal (T T): the positions a token must not see."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)


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
        attn_mask=causal_mask(length, q.device),
        use_separate_proj_weight=True,
        q_proj_weight=identity,
        k_proj_weight=identity,
        v_proj_weight=identity,
    )
    return out.transpose(0, 1).unflatten(-1, (heads, width))


def terms(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, upstream: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Root sum of squares of the terms of dq and dk, where dS = P (dP - sum(P dP)) cancels."""
    groups = q.shape[2] // k.shape[2]
    q, do = q.transpose(1, 2), upstream["o"].transpose(1, 2)
    k, v = (x.transpose(1, 2).repeat_interleave(groups, 1) for x in (k, v))
    scale = q.shape[-1] ** -0.5
    scores = (q @ k.mT * scale).masked_fill(causal_mask(q.shape[2], q.device), float("-inf"))
    p = torch.softmax(scores, -1)
    dp2 = do.square() @ v.square().mT
    ds2 = p.square() * (dp2 + (p.square() * dp2).sum(-1, keepdim=True))
    dk2 = (ds2.mT @ q.square()).unflatten(1, (-1, groups)).sum(2)
    return {
        "grad q": scale * (ds2 @ k.square()).sqrt().transpose(1, 2),
        "grad k": scale * dk2.sqrt().transpose(1, 2),
    }
