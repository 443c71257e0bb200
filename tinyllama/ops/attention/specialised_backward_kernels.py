"""The backward pass of causal flash attention with specialised warps, in Gluon.

Parts of a program, tiles, descriptors, barriers and names as in
`tinyllama.ops.attention.specialised_kernels`.
"""

from tinyllama.harness.kernels.gluon import (
    fence_async_shared,
    gl,
    jit,
    load_tile,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tinyllama.ops.attention.specialised_kernels import (
    COUNTS,
    ROWS,
    TILE,
    at_turn,
    barriers,
    mine,
    slot_of,
)


@jit
def _vector(x, start, OF: gl.constexpr):
    """Elements start to start + ROWS of x, one for each row of a tile of layout OF."""
    return gl.load(x + start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OF)))


@jit
def _note(parts, total, row, n_parts, part, OF: gl.constexpr):
    """Store (ROWS) as rows row to row + ROWS, in column ``part`` of parts."""
    at = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OF))
    gl.store(parts + at * n_parts + part, total)


@jit
def _put(x, stride, start, tile, D: gl.constexpr, OF: gl.constexpr):
    """Store a tile (ROWS D) as rows start to start + ROWS of x (T D)."""
    row = (start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OF))).to(gl.int64)
    column = gl.arange(0, D, layout=gl.SliceLayout(0, OF))
    gl.store(x + (row * stride)[:, None] + column[None, :], tile.to(x.dtype.element_ty))


@jit
def _rotated_back(tile, cos, sin, start, D: gl.constexpr):
    """Rows start to start + ROWS of a gradient (ROWS D), by pairs of columns."""
    even, odd = gl.split(gl.reshape(tile, [ROWS, D // 2, 2]))
    OF: gl.constexpr = even.type.layout
    row = start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OF))
    pair = gl.arange(0, D // 2, layout=gl.SliceLayout(0, OF))
    at = (row * (D // 2))[:, None] + pair[None, :]
    cosine = gl.load(cos + at).to(gl.float32)
    sine = gl.load(sin + at).to(gl.float32)
    pairs = gl.join(even * cosine + odd * sine, odd * cosine - even * sine)
    return gl.convert_layout(gl.reshape(pairs, [ROWS, D]), tile.type.layout)


@jit
def _tiles(
    kept_1, kept_2, stepped_1, stepped_2, STEP: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Shared memory for two matrices of which a program keeps its rows, and for two that it goes
    through, STAGES steps at a time."""
    dtype: gl.constexpr = kept_1.dtype
    kept_1_s = gl.allocate_shared_memory(dtype, [2, ROWS, D], kept_1.layout)
    kept_2_s = gl.allocate_shared_memory(dtype, [2, ROWS, D], kept_2.layout)
    stepped_1_s = gl.allocate_shared_memory(dtype, [STAGES, STEP, D], stepped_1.layout)
    stepped_2_s = gl.allocate_shared_memory(dtype, [STAGES, STEP, D], stepped_2.layout)
    return kept_1_s, kept_2_s, stepped_1_s, stepped_2_s


# -- gradients of keys and values -------------------------------------------------------------


@jit
def _keys_copies(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, q_s, do_s, k_s, v_s, lse_s, delta_s,
    kv_full, kv_free, q_full, do_full, free, T, H, G, tiles, heads,
    STEP: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    step = 0
    for turn in range(mine(tiles)):
        rank, bg = at_turn(turn, heads)
        start = rank * TILE
        batch = bg // G
        group = bg % G
        of_group = H // G
        for c in gl.static_range(2):
            mbarrier.wait(kv_free.index(c), (turn & 1) ^ 1)
            mbarrier.expect(kv_full.index(c), 2 * ROWS * D * 2)
            at = batch * T + start + c * ROWS
            load_tile(k_desc, [at, group * D], kv_full.index(c), k_s.index(c))
            load_tile(v_desc, [at, group * D], kv_full.index(c), v_s.index(c))
        for h in range(of_group):
            head = group * of_group + h
            for m in range(start, T, STEP):
                slot, phase = slot_of(step, STAGES)
                mbarrier.wait(free.index(slot), phase ^ 1)
                mbarrier.expect(q_full.index(slot), STEP * D * 2 + STEP * 4)
                load_tile(q_desc, [batch * T + m, head * D], q_full.index(slot), q_s.index(slot))
                at = (batch * H + head) * T + m
                load_tile(lse_desc, [at], q_full.index(slot), lse_s.index(slot))
                mbarrier.expect(do_full.index(slot), STEP * D * 2 + STEP * 4)
                load_tile(do_desc, [batch * T + m, head * D], do_full.index(slot), do_s.index(slot))
                load_tile(delta_desc, [at], do_full.index(slot), delta_s.index(slot))
                step += 1


@jit
def _keys_products(
    C: gl.constexpr, dk, dv, cos, sin, rstd, parts, q_s, do_s, k_s, v_s, lse_s, delta_s,
    kv_full, kv_free, q_full, do_full, free, slope, scale, T, H, G, tiles, heads,
    dk_b, dk_t, dk_h, dv_b, dv_t, dv_h,
    STEP: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    dtype: gl.constexpr = q_s.dtype
    zeros = gl.zeros([ROWS, STEP], gl.float32, S)
    along: gl.constexpr = gl.SliceLayout(0, S)
    query = gl.arange(0, STEP, layout=along)
    step = 0
    for turn in range(mine(tiles)):
        rank, bg = at_turn(turn, heads)
        start = rank * TILE
        key = start + C * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
        k = k_s.index(C)
        v = v_s.index(C)
        dk_sum = gl.zeros([ROWS, D], gl.float32, A)
        dv_sum = gl.zeros([ROWS, D], gl.float32, A)
        mbarrier.wait(kv_full.index(C), turn & 1)
        steps = (T - start) // STEP
        for i in range(H // G * steps):
            m = start + i % steps * STEP
            slot, phase = slot_of(step, STAGES)
            q = q_s.index(slot)
            do = do_s.index(slot)
            mbarrier.wait(q_full.index(slot), phase)
            s = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
            mbarrier.wait(do_full.index(slot), phase)
            dp = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s])
            if m < start + TILE:
                s = gl.where(m + query[None, :] >= key[:, None], s, float("-inf"))
            p = gl.exp2(s * slope - lse_s.index(slot).load(along)[None, :])
            low = gl.convert_layout(p.to(dtype), P)
            dv_next = warpgroup_mma(low, do, dv_sum, is_async=True)
            dp = warpgroup_mma_wait(1, deps=[dp])
            ds = p * (dp - delta_s.index(slot).load(along)[None, :])
            low_ds = gl.convert_layout(ds.to(dtype), P)
            dk_next = warpgroup_mma(low_ds, q, dk_sum, is_async=True)
            dv_sum, dk_sum, low, low_ds = warpgroup_mma_wait(
                0, deps=[dv_next, dk_next, low, low_ds]
            )
            mbarrier.arrive(free.index(slot), count=1)
            step += 1
        batch = (bg // G).to(gl.int64)
        group = (bg % G).to(gl.int64)
        first = start + C * ROWS
        dk_sum *= scale
        if rstd is not None:
            factor = _vector(rstd + batch * T, first, A)
            dk_sum *= factor[:, None]
            dv_sum *= factor[:, None]
            of_k = gl.sum(dk_sum * k.load(A).to(gl.float32), 1)
            of_v = gl.sum(dv_sum * v.load(A).to(gl.float32), 1)
            _note(parts, of_k + of_v, batch * T + first, H + G, H + group, A)
        mbarrier.arrive(kv_free.index(C), count=1)
        _put(dv + batch * dv_b + group * dv_h, dv_t, first, dv_sum, D, A)
        if cos is not None:
            dk_sum = _rotated_back(dk_sum, cos, sin, first, D)
        _put(dk + batch * dk_b + group * dk_h, dk_t, first, dk_sum, D, A)


@jit(unspecialised=COUNTS)
def specialised_keys_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, cos, sin, dk, dv, rstd, parts,
    slope, scale, T, H, G, tiles, heads, dk_b, dk_t, dk_h, dv_b, dv_t, dv_h,
    STEP: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dk and dv for 128 keys of one key/value head at a time."""
    k_s, v_s, q_s, do_s = _tiles(k_desc, v_desc, q_desc, do_desc, STEP, D, STAGES)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, STEP], lse_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, STEP], delta_desc.layout)
    kv_full, kv_free = barriers(2, 1), barriers(2, 1)
    q_full, do_full, free = barriers(STAGES, 1), barriers(STAGES, 1), barriers(STAGES, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_keys_products, (0, dk, dv, cos, sin, rstd, parts, q_s, do_s, k_s, v_s, lse_s,
                              delta_s, kv_full, kv_free, q_full, do_full, free, slope, scale, T,
                              H, G, tiles, heads, dk_b, dk_t, dk_h, dv_b, dv_t, dv_h,
                              STEP, D, STAGES)),
            (_keys_products, (1, dk, dv, cos, sin, rstd, parts, q_s, do_s, k_s, v_s, lse_s,
                              delta_s, kv_full, kv_free, q_full, do_full, free, slope, scale, T,
                              H, G, tiles, heads, dk_b, dk_t, dk_h, dv_b, dv_t, dv_h,
                              STEP, D, STAGES)),
            (_keys_copies, (q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, q_s, do_s, k_s,
                            v_s, lse_s, delta_s, kv_full, kv_free, q_full, do_full, free,
                            T, H, G, tiles, heads, STEP, D, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


# -- gradients of queries ---------------------------------------------------------------------


@jit
def _queries_copies(
    q_desc, k_desc, v_desc, do_desc, q_s, do_s, k_s, v_s, q_full, q_free, k_full, v_full, free,
    T, H, G, tiles, heads, STEP: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    step = 0
    for turn in range(mine(tiles)):
        rank, bh = at_turn(turn, heads)
        start = T - (rank + 1) * TILE
        row = bh // H * T
        head = bh % H
        group = head // (H // G)
        for c in gl.static_range(2):
            mbarrier.wait(q_free.index(c), (turn & 1) ^ 1)
            mbarrier.expect(q_full.index(c), 2 * ROWS * D * 2)
            at = row + start + c * ROWS
            load_tile(q_desc, [at, head * D], q_full.index(c), q_s.index(c))
            load_tile(do_desc, [at, head * D], q_full.index(c), do_s.index(c))
        for n in range(0, start + TILE, STEP):
            slot, phase = slot_of(step, STAGES)
            mbarrier.wait(free.index(slot), phase ^ 1)
            mbarrier.expect(k_full.index(slot), STEP * D * 2)
            load_tile(k_desc, [row + n, group * D], k_full.index(slot), k_s.index(slot))
            mbarrier.expect(v_full.index(slot), STEP * D * 2)
            load_tile(v_desc, [row + n, group * D], v_full.index(slot), v_s.index(slot))
            step += 1


@jit
def _queries_products(
    C: gl.constexpr, o, lse, delta, dq, cos, sin, rstd, parts, q_s, do_s, k_s, v_s,
    q_full, q_free, k_full, v_full, free, slope, scale, T, H, G, tiles, heads, dq_b, dq_t, dq_h,
    STEP: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    LINE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = q_s.dtype
    zeros = gl.zeros([ROWS, STEP], gl.float32, S)
    step = 0
    for turn in range(mine(tiles)):
        rank, bh = at_turn(turn, heads)
        first = T - (rank + 1) * TILE
        start = first + C * ROWS
        batch = (bh // H).to(gl.int64)
        head = (bh % H).to(gl.int64)
        row = start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
        q = q_s.index(C)
        do = do_s.index(C)
        line = start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LINE))
        across = gl.arange(0, D, layout=gl.SliceLayout(0, LINE))[None, :]
        o_tile = gl.load(
            o + (batch * T * H + head) * D + (line.to(gl.int64) * (H * D))[:, None] + across
        )
        lse_row = gl.load(lse + bh * T + row)
        mbarrier.wait(q_full.index(C), turn & 1)
        sums = gl.sum(o_tile.to(gl.float32) * do.load(LINE).to(gl.float32), 1)
        gl.store(delta + bh * T + line, sums)
        delta_row = gl.convert_layout(sums, gl.SliceLayout(1, S))
        dq_sum = gl.zeros([ROWS, D], gl.float32, A)
        for n in range(0, first + TILE, STEP):
            slot, phase = slot_of(step, STAGES)
            k = k_s.index(slot)
            v = v_s.index(slot)
            mbarrier.wait(k_full.index(slot), phase)
            s = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(slot), phase)
            dp = warpgroup_mma(do, v.permute((1, 0)), zeros, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s])
            if n + STEP > start:
                column = n + gl.arange(0, STEP, layout=gl.SliceLayout(0, S))[None, :]
                s = gl.where(row[:, None] >= column, s, float("-inf"))
            p = gl.exp2(s * slope - lse_row[:, None])
            dp = warpgroup_mma_wait(0, deps=[dp])
            low = gl.convert_layout((p * (dp - delta_row[:, None])).to(dtype), P)
            dq_next = warpgroup_mma(low, k, dq_sum, is_async=True)
            dq_sum, low = warpgroup_mma_wait(0, deps=[dq_next, low])
            mbarrier.arrive(free.index(slot), count=1)
            step += 1
        dq_sum *= scale
        if rstd is not None:
            dq_sum *= _vector(rstd + batch * T, start, A)[:, None]
            of_q = gl.sum(dq_sum * q.load(A).to(gl.float32), 1)
            _note(parts, of_q, batch * T + start, H + G, head, A)
        mbarrier.arrive(q_free.index(C), count=1)
        if cos is not None:
            dq_sum = _rotated_back(dq_sum, cos, sin, start, D)
        _put(dq + batch * dq_b + head * dq_h, dq_t, start, dq_sum, D, A)


@jit(unspecialised=COUNTS)
def specialised_queries_kernel(
    q_desc, k_desc, v_desc, do_desc, o, lse, delta, cos, sin, dq, rstd, parts,
    slope, scale, T, H, G, tiles, heads, dq_b, dq_t, dq_h,
    STEP: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dq for 128 queries of one head at a time, and their delta = sum(do o)."""
    q_s, do_s, k_s, v_s = _tiles(q_desc, do_desc, k_desc, v_desc, STEP, D, STAGES)
    q_full, q_free = barriers(2, 1), barriers(2, 1)
    k_full, v_full, free = barriers(STAGES, 1), barriers(STAGES, 1), barriers(STAGES, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_queries_products, (0, o, lse, delta, dq, cos, sin, rstd, parts, q_s, do_s, k_s,
                                 v_s, q_full, q_free, k_full, v_full, free, slope, scale, T, H, G,
                                 tiles, heads, dq_b, dq_t, dq_h, STEP, D, STAGES)),
            (_queries_products, (1, o, lse, delta, dq, cos, sin, rstd, parts, q_s, do_s, k_s,
                                 v_s, q_full, q_free, k_full, v_full, free, slope, scale, T, H, G,
                                 tiles, heads, dq_b, dq_t, dq_h, STEP, D, STAGES)),
            (_queries_copies, (q_desc, k_desc, v_desc, do_desc, q_s, do_s, k_s, v_s, q_full, q_free,
                               k_full, v_full, free, T, H, G, tiles, heads, STEP, D, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
