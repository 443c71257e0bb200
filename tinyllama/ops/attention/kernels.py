"""Causal flash attention in Triton: the kernels of `attention`.

The online softmax of Dao (arXiv 2307.08691): scores live in registers, memory is linear in T. The
backward makes the weights again from the saved log-sum-exp. A program owns a block of queries (o,
dq) or a block of keys of one key/value head, for all query heads that read it (dk, dv): nothing
is added through memory, and equal inputs give equal bits.

Exponentials have base 2: with slope = log2(e) / sqrt(K), softmax(q k / sqrt(K)) = 2^(slope q k -
lse), lse = log2(sum(2^(slope q k))). Operands of products are in the inputs' dtype, sums in
float32. P and dS are rounded to that dtype, or to tf32 where products are in it; q, k, v and do are
read as they are. Strides are in elements, of batch, token and head; K is the head
dimension, D the next power of two. EVEN: all blocks divide T. SPLIT: blocks off the diagonal go
through a loop of their own, without a mask. TURN: where an operand of a product is read along its
outer axis it comes from a copy of its transpose (H K, B T), whose rows are ``tokens`` apart: the
matrix units of some chips take float32 operands along the inner axis alone. cos and sin (T K/2), or
None: the rotation that q and k went through (see `rope`), which their gradients go back through.
rstd (B T), or None: a factor of each row of the gradients; parts (B T, H + G) are then each head's
sums of dq q, and of dk k + dv v, over a row. o_turned (H K, B T) and turned ((H + 2 G) K, B T), or
None: the memory for the transposes of o, and of dq, dk and dv below each other.
"""

from tinyllama.harness.kernels import begin, jit, tl
from tinyllama.harness.kernels.tf32 import to_tf32


@jit
def _tile(
    x, stride, start, T, ROWS: tl.constexpr, K: tl.constexpr, D: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """Rows start to start + ROWS of x (T K) as (ROWS D): zeros past row T (unless all rows are
    known to exist: WHOLE) and past column K."""
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, D)[None, :]
    at = x + tl.cast(start, tl.int64) * stride + (row * stride + column)
    if WHOLE:
        tile = tl.load(at) if K == D else tl.load(at, mask=column < K, other=0.0)
    else:
        tile = tl.load(at, mask=(row < T - start) & (column < K), other=0.0)
    return tile


@jit
def _turned(
    x, tokens, start, T, ROWS: tl.constexpr, K: tl.constexpr, D: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """What `_tile` gives, from the transpose of x."""
    column = tl.arange(0, D)[:, None]
    row = tl.arange(0, ROWS)[None, :]
    at = x + start + (column * tokens + row)
    if WHOLE:
        tile = tl.load(at) if K == D else tl.load(at, mask=column < K, other=0.0)
    else:
        tile = tl.load(at, mask=(row < T - start) & (column < K), other=0.0)
    return tl.trans(tile)


@jit
def _vector(x, start, T, ROWS: tl.constexpr, WHOLE: tl.constexpr):
    """Elements start to start + ROWS of x (T), zeros past T."""
    row = tl.arange(0, ROWS)
    at = x + start + row
    return tl.load(at) if WHOLE else tl.load(at, mask=row < T - start, other=0.0)


@jit
def _put(x, stride, start, tile, T, ROWS: tl.constexpr, K: tl.constexpr, D: tl.constexpr):
    """Store a tile (ROWS D) as rows start to start + ROWS of x (T K)."""
    row = start + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, D)[None, :]
    at = x + row.to(tl.int64) * stride + column
    tl.store(at, tile.to(x.dtype.element_ty), mask=(row < T) & (column < K))


@jit
def _put_turned(x, tokens, start, tile, T, ROWS: tl.constexpr, K: tl.constexpr, D: tl.constexpr):
    """What `_put` stores, into the transpose of x, whose rows are ``tokens`` apart."""
    row = start + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, D)[None, :]
    at = x + column.to(tl.int64) * tokens + row
    tl.store(at, tile.to(x.dtype.element_ty), mask=(row < T) & (column < K))


@jit
def _note(parts, total, batch, start, T, n_parts, part, ROWS: tl.constexpr):
    """Store (ROWS) as rows start to start + ROWS of a batch's, in column ``part`` of parts."""
    row = start + tl.arange(0, ROWS)
    tl.store(parts + (batch * T + row) * n_parts + part, total, mask=row < T)


@jit
def _rotated_back(tile, cos, sin, start, T, ROWS: tl.constexpr, K: tl.constexpr, D: tl.constexpr):
    """Rows start to start + ROWS of a gradient, (ROWS D) in float32, by pairs of columns."""
    row = start + tl.arange(0, ROWS)[:, None]
    pair = tl.arange(0, D // 2)[None, :]
    at = row.to(tl.int64) * (K // 2) + pair
    inside = (row < T) & (pair < K // 2)
    cosine = tl.load(cos + at, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sin + at, mask=inside, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(tile, (ROWS, D // 2, 2)))
    pairs = tl.join(even * cosine + odd * sine, odd * cosine - even * sine)
    return tl.reshape(pairs, (ROWS, D))


@jit
def _weights(s, slope, lse):
    """2^(slope s - lse). Where lse is float64, its rounding error is subtracted separately."""
    upper = lse.to(tl.float32)
    exponent = s * slope - upper
    if lse.dtype == tl.float64:
        exponent -= (lse - upper.to(tl.float64)).to(tl.float32)
    return tl.exp2(exponent)


@jit
def _attend_to(
    acc, highest, rest, total, q, k, v, k_t, v_t, slope, start, first, last, T,
    CAUSAL: tl.constexpr, WHOLE: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    QM: tl.constexpr, QN: tl.constexpr, PRECISION: tl.constexpr, TURN: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax for each block of keys from first to last. TURN: v is the
    transpose, v_t the distance of its rows. EXACT: the highest logarithm is highest + rest. A GPU
    computes s * slope - highest in one instruction, so the rounding error of ``highest`` is left,
    which is more than 128 beyond scores of 2^31; 2^128 is infinite in float32. Where it rounds
    twice, rest is 0."""
    row = start + tl.arange(0, QM)[:, None]
    for n in range(first, last, QN):
        k_ND = _tile(k, k_t, n, T, QN, K, D, WHOLE)
        s = tl.dot(q, tl.trans(k_ND), input_precision=PRECISION)
        if CAUSAL:
            s = tl.where(row >= n + tl.arange(0, QN)[None, :], s, float("-inf"))
        top = tl.max(s, 1)
        raised = tl.maximum(highest, top * slope)
        exponent = s * slope - raised[:, None]
        before = highest - raised
        if EXACT:
            before += rest
            rest = tl.maximum(before, top * slope - raised)
            before -= rest
            exponent -= rest[:, None]
        p = tl.exp2(exponent)
        shrink = tl.exp2(before)
        total = total * shrink + tl.sum(p, 1)
        if PRECISION == "tf32":
            p = to_tf32(p)
        if TURN:
            v_ND = _turned(v, v_t, n, T, QN, K, D, WHOLE)
        else:
            v_ND = _tile(v, v_t, n, T, QN, K, D, WHOLE)
        acc = tl.dot(p.to(v_ND.dtype), v_ND, acc * shrink[:, None], input_precision=PRECISION)
        highest = raised
    return acc, highest, rest, total


@jit
def forward_kernel(
    q, k, v, o, lse, slope, T, H, G,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h,
    K: tl.constexpr, D: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr,
    QM: tl.constexpr, QN: tl.constexpr, PRECISION: tl.constexpr, TURN: tl.constexpr = 0,
    PDL: tl.constexpr = False, program=None, o_turned=None, tokens=None,
):  # fmt: skip
    """o and lse for QM queries of one head; the last queries, which see most, come first. Called by
    another kernel, it does the work of its program number ``program``."""
    begin(PDL)
    blocks = tl.cdiv(T, QM)
    if program is None:
        program = tl.program_id(0)
    start = (blocks - 1 - program % blocks) * QM
    batch = (program // blocks // H).to(tl.int64)
    head = (program // blocks % H).to(tl.int64)
    group = head // (H // G)
    q_MD = _tile(q + batch * q_b + head * q_h, q_t, start, T, QM, K, D, EVEN)
    k += batch * k_b + group * k_h
    v += batch * v_b + group * v_h

    exact: tl.constexpr = lse.dtype.element_ty == tl.float64
    acc = tl.zeros((QM, D), tl.float32)
    highest = tl.full((QM,), float("-inf"), tl.float32)
    total, rest = tl.zeros((QM,), tl.float32), tl.zeros((QM,), tl.float32)
    diagonal = 0
    if SPLIT:  # key blocks that all of these queries see need no mask
        diagonal = start // QN * QN
        acc, highest, rest, total = _attend_to(
            acc, highest, rest, total, q_MD, k, v, k_t, v_t, slope, start, 0, diagonal, T,
            False, True, K, D, QM, QN, PRECISION, TURN, exact,
        )  # fmt: skip
    # Every query sees key 0, so the first block leaves a finite maximum in each row.
    acc, highest, rest, total = _attend_to(
        acc, highest, rest, total, q_MD, k, v, k_t, v_t, slope, start, diagonal,
        tl.minimum(start + QM, T), T, True, EVEN, K, D, QM, QN, PRECISION, TURN, exact,
    )  # fmt: skip

    o += (batch * T * H + head) * K
    _put(o, tl.cast(H, tl.int64) * K, start, acc / total[:, None], T, QM, K, D)
    if o_turned is not None:
        o_turned += head * K * tokens + batch * T
        _put_turned(o_turned, tokens, start, acc / total[:, None], T, QM, K, D)
    row = start + tl.arange(0, QM)
    at = lse + (batch * H + head) * T + row
    log2_sum = highest.to(lse.dtype.element_ty)
    if exact:
        log2_sum += rest.to(tl.float64)
    log2_sum += tl.log2(total).to(lse.dtype.element_ty)
    tl.store(at, log2_sum, mask=row < T)


@jit
def _to_queries(
    dq, q, do, lse, delta, k, v, k_turned, tokens, k_t, v_t, slope, start, first, last, T,
    CAUSAL: tl.constexpr, WHOLE: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    QM: tl.constexpr, QN: tl.constexpr, PRECISION: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """dq (QM D) += dS k over the key blocks from first to last."""
    row = start + tl.arange(0, QM)[:, None]
    for n in range(first, last, QN):
        k_ND = _tile(k, k_t, n, T, QN, K, D, WHOLE)
        v_ND = _tile(v, v_t, n, T, QN, K, D, WHOLE)
        s = tl.dot(q, tl.trans(k_ND), input_precision=PRECISION)
        if CAUSAL:
            s = tl.where(row >= n + tl.arange(0, QN)[None, :], s, float("-inf"))
        p = _weights(s, slope, lse[:, None])
        dp = tl.dot(do, tl.trans(v_ND), input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        if PRECISION == "tf32":
            ds = to_tf32(ds)
        if TURN:
            k_ND = _turned(k_turned, tokens, n, T, QN, K, D, WHOLE)
        dq = tl.dot(ds.to(k_ND.dtype), k_ND, dq, input_precision=PRECISION)
    return dq


@jit
def _to_keys(
    dk, dv, k, v, q, o, do, lse, delta, q_turned, do_turned, tokens, q_t, q_h, do_t, do_h, slope,
    start, m, T, H, head,
    CAUSAL: tl.constexpr, WHOLE: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    KM: tl.constexpr, KN: tl.constexpr, PRECISION: tl.constexpr, TURN: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """dk += dS^T q and dv += P^T do (KN D) over the query block from m of one of the heads that
    read these keys. All is transposed, keys by queries, which spares transposing P and dS. AHEAD:
    both products that P and dS are made of come first, at the price of registers."""
    q_MD = _tile(q + head * q_h, q_t, m, T, KM, K, D, WHOLE)
    do_MD = _tile(do + head * do_h, do_t, m, T, KM, K, D, WHOLE)
    lse_M = _vector(lse + head * T, m, T, KM, WHOLE)
    if delta is None:
        o_MD = _tile(o + head * K, H * K, m, T, KM, K, D, WHOLE)
        delta_M = tl.sum(o_MD.to(tl.float32) * do_MD.to(tl.float32), 1)
    else:
        delta_M = _vector(delta + head * T, m, T, KM, WHOLE)
    s = tl.dot(k, tl.trans(q_MD), input_precision=PRECISION)
    if CAUSAL:
        column = start + tl.arange(0, KN)[:, None]
        s = tl.where(m + tl.arange(0, KM)[None, :] >= column, s, float("-inf"))
    do_MD = do_MD.to(q_MD.dtype)
    if AHEAD:
        dp = tl.dot(v, tl.trans(do_MD), input_precision=PRECISION)
    p = _weights(s, slope, lse_M[None, :])
    if PRECISION == "tf32":
        p = to_tf32(p)
    if TURN:
        at = head * K * tokens
        do_ahead = _turned(do_turned + at, tokens, m, T, KM, K, D, WHOLE)
        dv = tl.dot(p, do_ahead, dv, input_precision=PRECISION)
    else:
        dv = tl.dot(p.to(do_MD.dtype), do_MD, dv, input_precision=PRECISION)
    if not AHEAD:
        dp = tl.dot(v, tl.trans(do_MD), input_precision=PRECISION)
    ds = p * (dp - delta_M[None, :])
    if PRECISION == "tf32":
        ds = to_tf32(ds)
    if TURN:
        q_MD = _turned(q_turned + at, tokens, m, T, KM, K, D, WHOLE)
    dk = tl.dot(ds.to(q_MD.dtype), q_MD, dk, input_precision=PRECISION)
    return dk, dv


@jit
def queries(
    program, q, k, v, o, do, lse, delta, k_turned, tokens, cos, sin, dq, rstd, parts,
    slope, scale, T, H, G,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h, dq_b, dq_t, dq_h,
    K: tl.constexpr, D: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr,
    QM: tl.constexpr, QN: tl.constexpr, PRECISION: tl.constexpr, TURN: tl.constexpr, turned=None,
):  # fmt: skip
    """dq for QM queries of one head. Their delta = sum(do o) is stored where `keys` is to read
    it, in a later launch."""
    blocks = tl.cdiv(T, QM)
    start = (blocks - 1 - program % blocks) * QM
    batch = (program // blocks // H).to(tl.int64)
    head = (program // blocks % H).to(tl.int64)
    group = head // (H // G)
    q_MD = _tile(q + batch * q_b + head * q_h, q_t, start, T, QM, K, D, EVEN)
    do_MD = _tile(do + batch * do_b + head * do_h, do_t, start, T, QM, K, D, EVEN)
    o_MD = _tile(o + (batch * T * H + head) * K, H * K, start, T, QM, K, D, EVEN)
    delta_M = tl.sum(o_MD.to(tl.float32) * do_MD.to(tl.float32), 1)
    lse_M = _vector(lse + (batch * H + head) * T, start, T, QM, EVEN)
    if delta is not None:
        row = start + tl.arange(0, QM)
        tl.store(delta + (batch * H + head) * T + row, delta_M, mask=row < T)
    do_MD = do_MD.to(q_MD.dtype)
    k += batch * k_b + group * k_h
    v += batch * v_b + group * v_h
    if TURN:
        k_turned += group * K * tokens + batch * T

    dq_MD = tl.zeros((QM, D), tl.float32)
    diagonal = 0
    if SPLIT:
        diagonal = start // QN * QN
        dq_MD = _to_queries(
            dq_MD, q_MD, do_MD, lse_M, delta_M, k, v, k_turned, tokens, k_t, v_t, slope, start,
            0, diagonal, T, False, True, K, D, QM, QN, PRECISION, TURN,
        )  # fmt: skip
    dq_MD = _to_queries(
        dq_MD, q_MD, do_MD, lse_M, delta_M, k, v, k_turned, tokens, k_t, v_t, slope, start,
        diagonal, tl.minimum(start + QM, T), T, True, EVEN, K, D, QM, QN, PRECISION, TURN,
    )  # fmt: skip
    dq_MD *= scale
    if rstd is not None:
        dq_MD *= _vector(rstd + batch * T, start, T, QM, EVEN)[:, None]
        total = tl.sum(dq_MD * q_MD.to(tl.float32), 1)
        _note(parts, total, batch, start, T, H + G, head, QM)
    if cos is not None:
        dq_MD = _rotated_back(dq_MD, cos, sin, start, T, QM, K, D)
    _put(dq + batch * dq_b + head * dq_h, dq_t, start, dq_MD, T, QM, K, D)
    if turned is not None:
        _put_turned(turned + head * K * tokens + batch * T, tokens, start, dq_MD, T, QM, K, D)


@jit
def keys(
    program, q, k, v, o, do, lse, delta, q_turned, do_turned, tokens, cos, sin, dk, dv, rstd, parts,
    slope, scale, T, H, G,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h,
    dk_b, dk_t, dk_h, dv_b, dv_t, dv_h,
    K: tl.constexpr, D: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr,
    KM: tl.constexpr, KN: tl.constexpr, PRECISION: tl.constexpr, TURN: tl.constexpr,
    AHEAD: tl.constexpr, turned=None,
):  # fmt: skip
    """dk and dv for KN keys of one key/value head; the first keys, which most queries see, come
    first. delta is made here from o where it was not stored."""
    blocks = tl.cdiv(T, KN)
    start = program % blocks * KN
    batch = (program // blocks // G).to(tl.int64)
    group = (program // blocks % G).to(tl.int64)
    heads = H // G
    first_head = group * heads
    k_ND = _tile(k + batch * k_b + group * k_h, k_t, start, T, KN, K, D, EVEN)
    v_ND = _tile(v + batch * v_b + group * v_h, v_t, start, T, KN, K, D, EVEN)
    q += batch * q_b + first_head * q_h
    do += batch * do_b + first_head * do_h
    o += (batch * T * H + first_head) * K
    lse += (batch * H + first_head) * T
    if delta is not None:
        delta += (batch * H + first_head) * T
    if TURN:
        q_turned += first_head * K * tokens + batch * T
        do_turned += first_head * K * tokens + batch * T

    dk_ND = tl.zeros((KN, D), tl.float32)
    dv_ND = tl.zeros((KN, D), tl.float32)
    first = start // KM * KM
    if SPLIT:
        last = tl.minimum(tl.cdiv(start + KN, KM) * KM, T)
        for h in range(0, heads):
            for m in range(first, last, KM):
                dk_ND, dv_ND = _to_keys(
                    dk_ND, dv_ND, k_ND, v_ND, q, o, do, lse, delta, q_turned, do_turned, tokens,
                    q_t, q_h, do_t, do_h, slope, start, m, T, H, tl.cast(h, tl.int64),
                    True, EVEN, K, D, KM, KN, PRECISION, TURN, AHEAD,
                )  # fmt: skip
        for h in range(0, heads):
            for m in range(last, T, KM):  # query blocks that see all of these keys
                dk_ND, dv_ND = _to_keys(
                    dk_ND, dv_ND, k_ND, v_ND, q, o, do, lse, delta, q_turned, do_turned, tokens,
                    q_t, q_h, do_t, do_h, slope, start, m, T, H, tl.cast(h, tl.int64),
                    False, EVEN, K, D, KM, KN, PRECISION, TURN, AHEAD,
                )  # fmt: skip
    else:  # one loop, so that the few loads of a head run ahead of the one before
        steps = tl.cdiv(T - first, KM)
        for i in range(0, heads * steps):
            dk_ND, dv_ND = _to_keys(
                dk_ND, dv_ND, k_ND, v_ND, q, o, do, lse, delta, q_turned, do_turned, tokens,
                q_t, q_h, do_t, do_h, slope, start, first + i % steps * KM, T, H,
                tl.cast(i // steps, tl.int64), True, EVEN, K, D, KM, KN, PRECISION, TURN, AHEAD,
            )  # fmt: skip
    dk_ND *= scale
    if rstd is not None:
        factor = _vector(rstd + batch * T, start, T, KN, EVEN)[:, None]
        dk_ND *= factor
        dv_ND *= factor
        total = tl.sum(dk_ND * k_ND.to(tl.float32) + dv_ND * v_ND.to(tl.float32), 1)
        _note(parts, total, batch, start, T, H + G, H + group, KN)
    if cos is not None:
        dk_ND = _rotated_back(dk_ND, cos, sin, start, T, KN, K, D)
    _put(dk + batch * dk_b + group * dk_h, dk_t, start, dk_ND, T, KN, K, D)
    _put(dv + batch * dv_b + group * dv_h, dv_t, start, dv_ND, T, KN, K, D)
    if turned is not None:
        turned += (H + group) * K * tokens + batch * T
        _put_turned(turned, tokens, start, dk_ND, T, KN, K, D)
        turned += tl.cast(G, tl.int64) * K * tokens
        _put_turned(turned, tokens, start, dv_ND, T, KN, K, D)


@jit
def backward_kernel(
    q, k, v, o, do, lse, delta, q_turned, k_turned, do_turned, tokens, cos, sin, dq, dk, dv,
    rstd, parts, slope, scale, T, H, G, key_programs,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h,
    dq_b, dq_t, dq_h, dk_b, dk_t, dk_h, dv_b, dv_t, dv_h,
    KEYS: tl.constexpr, QUERIES: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    EVEN: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
    QM: tl.constexpr = 16, QN: tl.constexpr = 16, KM: tl.constexpr = 16, KN: tl.constexpr = 16,
    TURN: tl.constexpr = 0, AHEAD: tl.constexpr = 0, PDL: tl.constexpr = False, turned=None,
):  # fmt: skip
    """Programs for keys, which take longer, then those for queries, or one kind of them alone."""
    begin(PDL)
    program = tl.program_id(0)
    if KEYS:  # noqa: SIM102 - this one is decided when the kernel is compiled
        if program < key_programs:
            keys(
                program, q, k, v, o, do, lse, delta, q_turned, do_turned, tokens, cos, sin, dk, dv,
                rstd, parts, slope, scale, T, H, G,
                q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h,
                dk_b, dk_t, dk_h, dv_b, dv_t, dv_h,
                K, D, EVEN, SPLIT, KM, KN, PRECISION, TURN, AHEAD, turned,
            )  # fmt: skip
    if QUERIES:  # noqa: SIM102
        if program >= key_programs:
            queries(
                program - key_programs, q, k, v, o, do, lse, delta, k_turned, tokens, cos, sin, dq,
                rstd, parts, slope, scale, T, H, G,
                q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h,
                dq_b, dq_t, dq_h, K, D, EVEN, SPLIT, QM, QN, PRECISION, TURN, turned,
            )  # fmt: skip
