"""Attention of heads, in blocks of 16 keys with a running maximum, to the keys that a mask leaves; 0
where it leaves none. In Triton."""

import math

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.values import integers


@triton.jit
def attention_kernel(
    q, k, v, mask, y, scale, T, H, D, TILES, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr
):
    head = (tl.program_id(0) // TILES).to(tl.int64)
    row = ((tl.program_id(0) % TILES) * BM + tl.arange(0, BM)).to(tl.int64)
    d = tl.arange(0, BD)
    base = head * T * D
    at = row[:, None] * D + d[None, :]
    inside = (row[:, None] < T) & (d[None, :] < D)
    query = tl.load(q + base + at, mask=inside, other=0.0)
    largest = tl.full([BM], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BM], dtype=tl.float32)
    values = tl.zeros([BM, BD], dtype=tl.float32)
    for start in range(0, T, BN):
        column = (start + tl.arange(0, BN)).to(tl.int64)
        visible = tl.load(mask + (head // H) * T + column, mask=column < T, other=0) != 0
        of_key = (column < T)[None, :] & (d < D)[:, None]
        of_value = visible[:, None] & (d < D)[None, :]
        key = tl.load(k + base + column[None, :] * D + d[:, None], mask=of_key, other=0.0)
        value = tl.load(v + base + column[:, None] * D + d[None, :], mask=of_value, other=0.0)
        score = tl.dot(query, key, input_precision="ieee") * scale
        score = tl.where(visible[None, :], score, -float("inf"))
        new = tl.maximum(largest, tl.max(score, 1))
        shift = tl.where(new == -float("inf"), 0.0, new)
        p = tl.exp(score - shift[:, None])
        fade = tl.exp(largest - shift)
        total = total * fade + tl.sum(p, 1)
        values = values * fade[:, None] + tl.dot(p.to(value.dtype), value, input_precision="ieee")
        largest = new
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(y + base + at, values / total[:, None], mask=inside)


op = Op(
    "corpus_padded_attention",
    inputs={
        "q": Tensor("B H T D"),
        "k": Tensor("B H T D"),
        "v": Tensor("B H T D"),
        "mask": Tensor("B T", dtype=torch.bool, values=integers(2)),
    },
    outputs={"y": "B H T D"},
    cases=[Case(B=2, H=2, T=16, D=16), Case(B=1, H=1, T=15, D=20, why="ragged")],
    dtypes=(torch.float32,),
)


@op.reference
def eager(q, k, v, mask):
    wide = torch.promote_types(q.dtype, torch.float32)
    mask = mask[:, None, None, :]
    score = q.to(wide) @ k.to(wide).mT * q.shape[-1] ** -0.5
    p = score.masked_fill(~mask, -math.inf).softmax(-1)
    p = torch.where(mask.any(-1, keepdim=True), p, torch.zeros_like(p))
    v = torch.where(mask.mT, v.to(wide), 0.0)
    return (p @ v).to(q.dtype)


@op.independent("exponentials over their sum")
def written_out(q, k, v, mask):
    score = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(q.shape[-1])
    e = torch.exp(score - score.amax(-1, keepdim=True)) * mask[:, None, None, :]
    total = e.sum(-1, keepdim=True)
    return torch.einsum(
        "bhij,bhjd->bhid", e / total.where(total > 0, 1.0), v.where(mask[:, None, :, None], 0.0)
    )


@op.provider("triton", requires=("triton",), double_backward=False)
def candidate(q, k, v, mask):
    q, k, v, mask = (tensor.contiguous() for tensor in (q, k, v, mask))
    B, H, T, D = q.shape
    y = torch.empty(B, H, T, D, dtype=q.dtype, device=q.device)
    if y.numel():
        tiles = triton.cdiv(T, 16)
        BD = max(16, triton.next_power_of_2(D))
        attention_kernel[(B * H * tiles,)](
            q, k, v, mask, y, D**-0.5, T, H, D, tiles, BM=16, BN=16, BD=BD
        )
    return y


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    right("every_dtype", ("    dtypes=(torch.float32,),\n", "")),
    # With every key masked, the largest score is -inf, and -inf less itself is NaN.
    wrong(
        "nan_where_no_key_is_left",
        ('shift = tl.where(new == -float("inf"), 0.0, new)', "shift = new"),
        fault="overflow",
        result="y",
    ),
    # A weight of zero times an infinity is NaN, where the reference leaves the value out.
    wrong(
        "infinity_of_a_masked_value_reaches_y",
        ("of_value = visible[:, None]", "of_value = (column < T)[:, None]"),
        fault="overflow",
        result="v",
    ),
]
