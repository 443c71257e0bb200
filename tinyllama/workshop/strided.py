"""Attention that takes keys and values in any layout, for the stages about memory layout.

Keys and values are expanded to one head for each query head, as the published program does, with
the heads along the last axis. Seen as (B T H K), neighbours of one head are then H elements apart:
each value that a kernel reads comes with H - 1 of other heads that it does not use.
"""

import math
from typing import Any

import torch

from tinyllama.harness.kernels import cdiv, jit, next_power_of_2, tl
from tinyllama.harness.kernels.precision import input_precision
from tinyllama.ops.attention import attend_backward, lse_dtype

BLOCK = 32  # queries of a program, and keys of a turn of its loop


@jit
def strided_kernel(
    q, k, v, o, lse, slope, T, H,
    q_batch, q_token, q_head, q_inner, k_batch, k_token, k_head, k_inner,
    v_batch, v_token, v_head, v_inner,
    K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of queries of one head: o and the log2 of the sum of 2^(slope q k)."""
    first = tl.program_id(0) * BLOCK
    batch, head = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    rows, inner = first + tl.arange(0, BLOCK), tl.arange(0, D)[None, :]
    inside = (rows < T)[:, None] & (inner < K)
    at = batch * q_batch + head * q_head + rows[:, None] * q_token + inner * q_inner
    query = tl.load(q + at, mask=inside, other=0.0)
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.full((BLOCK,), 0.0, tl.float32)
    result = tl.full((BLOCK, D), 0.0, tl.float32)
    for start in range(0, first + BLOCK, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        there = (tokens < T)[:, None] & (inner < K)
        at = batch * k_batch + head * k_head + tokens[:, None] * k_token + inner * k_inner
        key = tl.load(k + at, mask=there, other=0.0)
        at = batch * v_batch + head * v_head + tokens[:, None] * v_token + inner * v_inner
        value = tl.load(v + at, mask=there, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * slope
        scores = tl.where(rows[:, None] >= tokens[None, :], scores, float("-inf"))
        highest = tl.maximum(most, tl.max(scores, 1))
        weights, shrink = tl.exp2(scores - highest[:, None]), tl.exp2(most - highest)
        total = total * shrink + tl.sum(weights, 1)
        result = result * shrink[:, None]
        result += tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
        most = highest
    row = (batch * T + rows) * H + head
    tl.store(o + row[:, None] * K + inner, (result / total[:, None]).to(o.dtype.element_ty), inside)
    row_lse = most.to(lse.dtype.element_ty) + tl.log2(total)
    tl.store(lse + tl.program_id(1).to(tl.int64) * T + rows, row_lse, mask=rows < T)


def expanded(x_BTGK: torch.Tensor, heads: int) -> torch.Tensor:
    """Keys or values (B T G K) -> (B T H K), written with the heads along the last axis."""
    return x_BTGK.transpose(2, 3).repeat_interleave(heads // x_BTGK.shape[2], -1).transpose(2, 3)


def attention(
    q_BTHK: torch.Tensor, k_BTGK: torch.Tensor, v_BTGK: torch.Tensor, *, dense: bool
) -> torch.Tensor:
    """Causal attention (B T H K) in one kernel; ``dense``: whether keys and values are copied to a
    dense last axis first, which is the fix. Differentiable; the backward pass copies."""
    k_BTHK, v_BTHK = (expanded(x, q_BTHK.shape[2]) for x in (k_BTGK, v_BTGK))
    if dense:
        k_BTHK, v_BTHK = k_BTHK.contiguous(), v_BTHK.contiguous()
    o_BTHK: torch.Tensor = _Attention.apply(q_BTHK, k_BTHK, v_BTHK)
    return o_BTHK


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        (B, T, H, K), o = q.shape, torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty((B, H, T), dtype=lse_dtype(q), device=q.device)
        strided_kernel[(cdiv(T, BLOCK), B * H)](
            *(q, k, v, o, lse, math.log2(math.e) * K**-0.5, T, H),
            *(stride for x in (q, k, v) for stride in x.stride()),
            K=K,
            D=max(16, next_power_of_2(K)),
            BLOCK=BLOCK,
            PRECISION=input_precision(q),
        )
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        gradients = tuple(x.new_empty(x.shape) for x in (q, k, v))
        attend_backward(do, q, k, v, o, lse, *gradients)
        return gradients
