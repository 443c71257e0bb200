"""Attention of short sequences with the product that makes q, k and v: a kernel of `stack`.

One program has all tokens of a sequence. Names and exponentials as in
`tinyllama.ops.attention.kernels`: K is the head dimension, D the next power of two, BT at least T.
"""

from __future__ import annotations

from tinyllama.harness.kernels import begin, jit, tl
from tinyllama.ops.stack.tile_kernels import row_sums, store_tile


@jit
def _rotated(tile, cos, sin, T, ROWS: tl.constexpr, K: tl.constexpr, D: tl.constexpr):
    """(ROWS D) float32, by pairs of columns, with the angles of the tokens from 0 on."""
    row, pair = tl.arange(0, ROWS)[:, None], tl.arange(0, D // 2)[None, :]
    at = row * (K // 2) + pair
    inside = (row < T) & (pair < K // 2)
    cosine = tl.load(cos + at, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sin + at, mask=inside, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(tile, (ROWS, D // 2, 2)))
    turned = tl.join(even * cosine - odd * sine, even * sine + odd * cosine)
    return tl.reshape(turned, (ROWS, D))


@jit
def attend_kernel(
    low, w, squares, rstd, cos, sin, qkv, o, lse, eps, slope, T, H, G, width, n_parts,
    PARTS: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, DESCRIBED: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """q, k and v of a head, the first two rotated, as columns of qkv (N E), and its o (N Q) and lse
    (B H T). The first of the heads that share k and v stores these."""
    begin(PDL)
    batch, head = tl.program_id(0) // H, tl.program_id(0) % H
    group = head // (H // G)
    row, last = batch * T, batch * T + T
    i, d, step = tl.arange(0, BT)[:, None], tl.arange(0, D), tl.arange(0, BK)
    at_q, at_k, at_v = head * K, (H + group) * K, (H + G + group) * K
    q = tl.zeros((BT, D), tl.float32)
    k = tl.zeros((BT, D), tl.float32)
    v = tl.zeros((BT, D), tl.float32)
    if DESCRIBED:
        for first in range(0, width, BK):
            x = low.load([row, first])
            q = tl.dot(x, tl.trans(w.load([at_q, first])), q, input_precision=PRECISION)
            k = tl.dot(x, tl.trans(w.load([at_k, first])), k, input_precision=PRECISION)
            v = tl.dot(x, tl.trans(w.load([at_v, first])), v, input_precision=PRECISION)
    else:
        low += tl.cast(row, tl.int64) * width + (i * width + step[None, :])
        at = d[None, :] * width + step[:, None]
        w_q = w + tl.cast(at_q, tl.int64) * width + at
        w_k = w + tl.cast(at_k, tl.int64) * width + at
        w_v = w + tl.cast(at_v, tl.int64) * width + at
        for first in range(0, width, BK):
            if EVEN:
                x, to_q, to_k, to_v = tl.load(low), tl.load(w_q), tl.load(w_k), tl.load(w_v)
            else:
                left = step < width - first
                there = left[:, None] & (d < K)[None, :]
                x = tl.load(low, mask=(i < T) & left[None, :], other=0.0)
                to_q = tl.load(w_q, mask=there, other=0.0)
                to_k = tl.load(w_k, mask=there, other=0.0)
                to_v = tl.load(w_v, mask=there, other=0.0)
            q = tl.dot(x, to_q, q, input_precision=PRECISION)
            k = tl.dot(x, to_k, k, input_precision=PRECISION)
            v = tl.dot(x, to_v, v, input_precision=PRECISION)
            low += BK
            w_q += BK
            w_k += BK
            w_v += BK
    scale = tl.rsqrt(row_sums(squares, row, last, n_parts, BT, PARTS) / width + eps)
    if head == 0:
        tl.store(rstd + row + tl.arange(0, BT), scale, mask=tl.arange(0, BT) < T)
    dtype = qkv.dtype.element_ty
    q = _rotated(q * scale[:, None], cos, sin, T, BT, K, D).to(dtype)
    k = _rotated(k * scale[:, None], cos, sin, T, BT, K, D).to(dtype)
    v = (v * scale[:, None]).to(dtype)
    n_columns = (H + 2 * G) * K
    store_tile(qkv, q, row, at_q, n_columns, last, at_q + K, BT, D, EVEN)
    if head % (H // G) == 0:
        store_tile(qkv, k, row, at_k, n_columns, last, at_k + K, BT, D, EVEN)
        store_tile(qkv, v, row, at_v, n_columns, last, at_v + K, BT, D, EVEN)
    key = tl.arange(0, BT)[None, :]
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    s = tl.where(i >= key, s, float("-inf"))
    highest = tl.max(s, 1) * slope
    p = tl.exp2(s * slope - highest[:, None])
    total = tl.sum(p, 1)
    attended = tl.dot(p.to(dtype), v, input_precision=PRECISION) / total[:, None]
    store_tile(o, attended, row, at_q, H * K, last, at_q + K, BT, D, EVEN)
    tokens = tl.arange(0, BT)
    places = lse + tl.program_id(0).to(tl.int64) * T + tokens
    tl.store(places, highest + tl.log2(total), mask=tokens < T)
