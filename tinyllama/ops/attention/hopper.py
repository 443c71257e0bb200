"""Causal flash attention in Gluon for Hopper's matrix units: the long sequences of `attention`.

A program has three parts, each with warps and registers of its own: one copies tiles to shared
memory (TMA), two multiply. While one of these two computes exponentials the other multiplies. As
many programs as multiprocessors take one tile after another, the longest first and every second
round in reverse, so that their sums are alike.

Matrices are descriptors of (B T, heads D) with blocks of 64 rows, or those a step takes; lse and
delta are (B H T). T is a multiple of 128. See `tinyllama.ops.attention.kernels` for the mathematics.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

ROWS = gl.constexpr(64)  # of a warp group
LOWEST = gl.constexpr(-1.0e30)  # less than any score: a row whose keys are all masked stays finite


@gluon.jit
def _mine(tiles):
    """How many tiles this program takes."""
    programs = gl.num_programs(0)
    full = tiles // programs
    program = gl.program_id(0)
    last = gl.where(full % 2 == 0, program, programs - 1 - program)
    return full + gl.where(last < tiles % programs, 1, 0)


@gluon.jit
def _at(turn, heads):
    """The rank of the tile's length, and its batch and head in one, at a program's turn."""
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    index = turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)
    return index // heads, index % heads


@gluon.jit
def _slot(step, STAGES: gl.constexpr):
    return step % STAGES, (step // STAGES) & 1


@gluon.jit
def _barriers(N: gl.constexpr, COUNT: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


# -- forward ----------------------------------------------------------------------------------


@gluon.jit
def _forward_copies(
    q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, q_free, k_full, k_free, v_full, v_free,
    T, H, G, tiles, heads, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    step = 0
    BM: gl.constexpr = 2 * ROWS
    for turn in range(_mine(tiles)):
        rank, bh = _at(turn, heads)
        start = T - (rank + 1) * BM
        row = bh // H * T
        head = bh % H
        group = head // (H // G)
        blocks = (start + BM) // BN
        for i in range(blocks):
            n = row + (blocks - 1 - i) * BN
            slot, phase = _slot(step, STAGES)
            mbarrier.wait(k_free.index(slot), phase ^ 1)
            mbarrier.expect(k_full.index(slot), BN * D * 2)
            tma.async_copy_global_to_shared(
                k_desc, [n, group * D], k_full.index(slot), k_s.index(slot)
            )
            if i == 0:
                for c in gl.static_range(2):
                    mbarrier.wait(q_free.index(c), (turn & 1) ^ 1)
                    mbarrier.expect(q_full.index(c), ROWS * D * 2)
                    tma.async_copy_global_to_shared(
                        q_desc, [row + start + c * ROWS, head * D], q_full.index(c), q_s.index(c)
                    )
            mbarrier.wait(v_free.index(slot), phase ^ 1)
            mbarrier.expect(v_full.index(slot), BN * D * 2)
            tma.async_copy_global_to_shared(
                v_desc, [n, group * D], v_full.index(slot), v_s.index(slot)
            )
            step += 1


@gluon.jit
def _softmax(s, highest, total, slope, row, n, MASK, BN: gl.constexpr, S: gl.constexpr):
    """-> weights, the new highest and total, and the factor of what was summed before."""
    if MASK:
        column = n + gl.arange(0, BN, layout=gl.SliceLayout(0, S))[None, :]
        s = gl.where(row[:, None] >= column, s, float("-inf"))
    raised = gl.maximum(highest, gl.max(s, 1) * slope)
    p = gl.exp2(s * slope - raised[:, None])
    shrink = gl.exp2(highest - raised)
    return p, raised, total * shrink + gl.sum(p, 1), shrink


@gluon.jit
def _forward_products(
    C: gl.constexpr, o_desc, lse, q_s, k_s, v_s, q_full, q_free, k_full, k_free, v_full, v_free,
    slope, T, H, G, tiles, heads, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
):  # fmt: skip
    BM: gl.constexpr = 2 * ROWS
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    dtype: gl.constexpr = q_s.dtype
    zeros = gl.zeros([ROWS, BN], gl.float32, S)
    step = 0
    for turn in range(_mine(tiles)):
        rank, bh = _at(turn, heads)
        start = T - (rank + 1) * BM
        blocks = (start + BM) // BN
        row = start + C * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
        q = q_s.index(C)
        o = gl.zeros([ROWS, D], gl.float32, O)
        highest = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, S))
        total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S))
        mbarrier.wait(q_full.index(C), turn & 1)
        if AHEAD:  # the scores of the next block are made under the softmax of this one
            slot, phase = _slot(step, STAGES)
            mbarrier.wait(k_full.index(slot), phase)
            s = warpgroup_mma(q, k_s.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(k_free.index(slot), count=1)
            p, highest, total, _ = _softmax(
                s, highest, total, slope, row, (blocks - 1) * BN, True, BN, S
            )
            low = gl.convert_layout(p.to(dtype), P)
            for i in range(1, blocks):
                before, phase_before = _slot(step, STAGES)
                step += 1
                slot, phase = _slot(step, STAGES)
                mbarrier.wait(k_full.index(slot), phase)
                s = warpgroup_mma(
                    q, k_s.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True
                )
                mbarrier.wait(v_full.index(before), phase_before)
                o_next = warpgroup_mma(low, v_s.index(before), o, is_async=True)
                s = warpgroup_mma_wait(1, deps=[s])
                mbarrier.arrive(k_free.index(slot), count=1)
                p, highest, total, shrink = _softmax(
                    s, highest, total, slope, row, (blocks - 1 - i) * BN, i < BM // BN, BN, S
                )
                o, low = warpgroup_mma_wait(0, deps=[o_next, low])
                mbarrier.arrive(v_free.index(before), count=1)
                o = o * gl.convert_layout(shrink, gl.SliceLayout(1, O))[:, None]
                low = gl.convert_layout(p.to(dtype), P)
            slot, phase = _slot(step, STAGES)
            mbarrier.wait(v_full.index(slot), phase)
            o = warpgroup_mma(low, v_s.index(slot), o, is_async=True)
            o, low = warpgroup_mma_wait(0, deps=[o, low])
            mbarrier.arrive(v_free.index(slot), count=1)
            step += 1
        else:
            for i in range(blocks):
                slot, phase = _slot(step, STAGES)
                mbarrier.wait(k_full.index(slot), phase)
                s = warpgroup_mma(
                    q, k_s.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True
                )
                s = warpgroup_mma_wait(0, deps=[s])
                mbarrier.arrive(k_free.index(slot), count=1)
                p, highest, total, shrink = _softmax(
                    s, highest, total, slope, row, (blocks - 1 - i) * BN, i < BM // BN, BN, S
                )
                o = o * gl.convert_layout(shrink, gl.SliceLayout(1, O))[:, None]
                low = gl.convert_layout(p.to(dtype), P)
                mbarrier.wait(v_full.index(slot), phase)
                o = warpgroup_mma(low, v_s.index(slot), o, is_async=True)
                o, low = warpgroup_mma_wait(0, deps=[o, low])
                mbarrier.arrive(v_free.index(slot), count=1)
                step += 1
        gl.store(lse + bh * T + row, highest + gl.log2(total))
        o = o / gl.convert_layout(total, gl.SliceLayout(1, O))[:, None]
        q.store(o.to(dtype))  # all products with q are done
        fence_async_shared()
        tma.async_copy_shared_to_global(
            o_desc, [bh // H * T + start + C * ROWS, bh % H * D], q
        )
        tma.store_wait(0)
        mbarrier.arrive(q_free.index(C), count=1)


@gluon.jit(do_not_specialize=("H", "G", "tiles", "heads"))
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, lse, slope, T, H, G, tiles, heads,
    BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """o and lse for 128 queries of one head at a time."""
    dtype: gl.constexpr = q_desc.dtype
    q_s = gl.allocate_shared_memory(dtype, [2, ROWS, D], q_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, BN, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, BN, D], v_desc.layout)
    q_full, q_free = _barriers(2, 1), _barriers(2, 1)
    k_full, k_free = _barriers(STAGES, 1), _barriers(STAGES, 2)
    v_full, v_free = _barriers(STAGES, 1), _barriers(STAGES, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_forward_products, (0, o_desc, lse, q_s, k_s, v_s, q_full, q_free, k_full, k_free,
                                 v_full, v_free, slope, T, H, G, tiles, heads, BN, D, STAGES, AHEAD)),
            (_forward_products, (1, o_desc, lse, q_s, k_s, v_s, q_full, q_free, k_full, k_free,
                                 v_full, v_free, slope, T, H, G, tiles, heads, BN, D, STAGES, AHEAD)),
            (_forward_copies, (q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, q_free, k_full,
                               k_free, v_full, v_free, T, H, G, tiles, heads, BN, D, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


# -- gradients of keys and values -------------------------------------------------------------


@gluon.jit
def _keys_copies(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, q_s, do_s, k_s, v_s, lse_s, delta_s,
    kv_full, kv_free, q_full, do_full, free, T, H, G, tiles, heads,
    BM: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    step = 0
    BN: gl.constexpr = 2 * ROWS
    for turn in range(_mine(tiles)):
        rank, bg = _at(turn, heads)
        start = rank * BN
        batch = bg // G
        group = bg % G
        of_group = H // G
        for c in gl.static_range(2):
            mbarrier.wait(kv_free.index(c), (turn & 1) ^ 1)
            mbarrier.expect(kv_full.index(c), 2 * ROWS * D * 2)
            at = batch * T + start + c * ROWS
            tma.async_copy_global_to_shared(
                k_desc, [at, group * D], kv_full.index(c), k_s.index(c)
            )
            tma.async_copy_global_to_shared(
                v_desc, [at, group * D], kv_full.index(c), v_s.index(c)
            )
        for h in range(of_group):
            head = group * of_group + h
            for m in range(start, T, BM):
                slot, phase = _slot(step, STAGES)
                mbarrier.wait(free.index(slot), phase ^ 1)
                mbarrier.expect(q_full.index(slot), BM * D * 2 + BM * 4)
                tma.async_copy_global_to_shared(
                    q_desc, [batch * T + m, head * D], q_full.index(slot), q_s.index(slot)
                )
                at = (batch * H + head) * T + m
                tma.async_copy_global_to_shared(
                    lse_desc, [at], q_full.index(slot), lse_s.index(slot)
                )
                mbarrier.expect(do_full.index(slot), BM * D * 2 + BM * 4)
                tma.async_copy_global_to_shared(
                    do_desc, [batch * T + m, head * D], do_full.index(slot), do_s.index(slot)
                )
                tma.async_copy_global_to_shared(
                    delta_desc, [at], do_full.index(slot), delta_s.index(slot)
                )
                step += 1


@gluon.jit
def _keys_products(
    C: gl.constexpr, dk, dv, q_s, do_s, k_s, v_s, lse_s, delta_s,
    kv_full, kv_free, q_full, do_full, free, slope, scale, T, H, G, tiles, heads,
    dk_b, dk_t, dk_h, dv_b, dv_t, dv_h,
    BM: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, DEFER: gl.constexpr,
):  # fmt: skip
    BN: gl.constexpr = 2 * ROWS
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    dtype: gl.constexpr = q_s.dtype
    zeros = gl.zeros([ROWS, BM], gl.float32, S)
    along: gl.constexpr = gl.SliceLayout(0, S)
    query = gl.arange(0, BM, layout=along)
    step = 0
    for turn in range(_mine(tiles)):
        rank, bg = _at(turn, heads)
        start = rank * BN
        key = start + C * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
        k = k_s.index(C)
        v = v_s.index(C)
        dk_sum = gl.zeros([ROWS, D], gl.float32, A)
        dv_sum = gl.zeros([ROWS, D], gl.float32, A)
        mbarrier.wait(kv_full.index(C), turn & 1)
        steps = (T - start) // BM
        if DEFER:  # the two sums are waited for in the next step, behind its scores
            dv_next = warpgroup_mma_init(dv_sum)
            dk_next = warpgroup_mma_init(dk_sum)
            for i in range(H // G * steps):
                m = start + i % steps * BM
                slot, phase = _slot(step, STAGES)
                before, _ = _slot(step + STAGES - 1, STAGES)
                q = q_s.index(slot)
                do = do_s.index(slot)
                mbarrier.wait(q_full.index(slot), phase)
                s = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
                mbarrier.wait(do_full.index(slot), phase)
                dp = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
                s, dv_sum, dk_sum = warpgroup_mma_wait(1, deps=[s, dv_next, dk_next])
                mbarrier.arrive(free.index(before), count=1, pred=i > 0)
                if m < start + BN:
                    s = gl.where(m + query[None, :] >= key[:, None], s, float("-inf"))
                p = gl.exp2(s * slope - lse_s.index(slot).load(along)[None, :])
                low = gl.convert_layout(p.to(dtype), P)
                dv_next = warpgroup_mma(low, do, dv_sum, is_async=True)
                dp = warpgroup_mma_wait(1, deps=[dp])
                ds = p * (dp - delta_s.index(slot).load(along)[None, :])
                low_ds = gl.convert_layout(ds.to(dtype), P)
                dk_next = warpgroup_mma(low_ds, q, dk_sum, is_async=True)
                step += 1
            dv_sum, dk_sum = warpgroup_mma_wait(0, deps=[dv_next, dk_next])
            mbarrier.arrive(free.index(_slot(step - 1, STAGES)[0]), count=1)
        else:
            for i in range(H // G * steps):
                m = start + i % steps * BM
                slot, phase = _slot(step, STAGES)
                q = q_s.index(slot)
                do = do_s.index(slot)
                mbarrier.wait(q_full.index(slot), phase)
                s = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
                mbarrier.wait(do_full.index(slot), phase)
                dp = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
                s = warpgroup_mma_wait(1, deps=[s])
                if m < start + BN:
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
        mbarrier.arrive(kv_free.index(C), count=1)
        batch = (bg // G).to(gl.int64)
        group = (bg % G).to(gl.int64)
        at = (start + C * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, A))).to(gl.int64)
        column = gl.arange(0, D, layout=gl.SliceLayout(0, A))[None, :]
        to_k = dk + batch * dk_b + group * dk_h + (at * dk_t)[:, None] + column
        gl.store(to_k, (dk_sum * scale).to(dk.dtype.element_ty))
        to_v = dv + batch * dv_b + group * dv_h + (at * dv_t)[:, None] + column
        gl.store(to_v, dv_sum.to(dv.dtype.element_ty))


@gluon.jit(do_not_specialize=("H", "G", "tiles", "heads"))
def keys_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk, dv, slope, scale,
    T, H, G, tiles, heads, dk_b, dk_t, dk_h, dv_b, dv_t, dv_h,
    BM: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, DEFER: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """dk and dv for 128 keys of one key/value head at a time."""
    dtype: gl.constexpr = q_desc.dtype
    k_s = gl.allocate_shared_memory(dtype, [2, ROWS, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [2, ROWS, D], v_desc.layout)
    q_s = gl.allocate_shared_memory(dtype, [STAGES, BM, D], q_desc.layout)
    do_s = gl.allocate_shared_memory(dtype, [STAGES, BM, D], do_desc.layout)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, BM], lse_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, BM], delta_desc.layout)
    kv_full, kv_free = _barriers(2, 1), _barriers(2, 1)
    q_full, do_full, free = _barriers(STAGES, 1), _barriers(STAGES, 1), _barriers(STAGES, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_keys_products, (0, dk, dv, q_s, do_s, k_s, v_s, lse_s, delta_s, kv_full, kv_free,
                              q_full, do_full, free, slope, scale, T, H, G, tiles, heads,
                              dk_b, dk_t, dk_h, dv_b, dv_t, dv_h, BM, D, STAGES, DEFER)),
            (_keys_products, (1, dk, dv, q_s, do_s, k_s, v_s, lse_s, delta_s, kv_full, kv_free,
                              q_full, do_full, free, slope, scale, T, H, G, tiles, heads,
                              dk_b, dk_t, dk_h, dv_b, dv_t, dv_h, BM, D, STAGES, DEFER)),
            (_keys_copies, (q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, q_s, do_s, k_s,
                            v_s, lse_s, delta_s, kv_full, kv_free, q_full, do_full, free,
                            T, H, G, tiles, heads, BM, D, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


# -- gradients of queries ---------------------------------------------------------------------


@gluon.jit
def _queries_copies(
    q_desc, k_desc, v_desc, do_desc, q_s, do_s, k_s, v_s, q_full, q_free, k_full, v_full, free,
    T, H, G, tiles, heads, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    step = 0
    BM: gl.constexpr = 2 * ROWS
    for turn in range(_mine(tiles)):
        rank, bh = _at(turn, heads)
        start = T - (rank + 1) * BM
        row = bh // H * T
        head = bh % H
        group = head // (H // G)
        for c in gl.static_range(2):
            mbarrier.wait(q_free.index(c), (turn & 1) ^ 1)
            mbarrier.expect(q_full.index(c), 2 * ROWS * D * 2)
            at = row + start + c * ROWS
            tma.async_copy_global_to_shared(q_desc, [at, head * D], q_full.index(c), q_s.index(c))
            tma.async_copy_global_to_shared(do_desc, [at, head * D], q_full.index(c), do_s.index(c))
        for n in range(0, start + BM, BN):
            slot, phase = _slot(step, STAGES)
            mbarrier.wait(free.index(slot), phase ^ 1)
            mbarrier.expect(k_full.index(slot), BN * D * 2)
            tma.async_copy_global_to_shared(
                k_desc, [row + n, group * D], k_full.index(slot), k_s.index(slot)
            )
            mbarrier.expect(v_full.index(slot), BN * D * 2)
            tma.async_copy_global_to_shared(
                v_desc, [row + n, group * D], v_full.index(slot), v_s.index(slot)
            )
            step += 1


@gluon.jit
def _queries_products(
    C: gl.constexpr, o, lse, delta, dq, q_s, do_s, k_s, v_s, q_full, q_free, k_full, v_full, free,
    slope, scale, T, H, G, tiles, heads, dq_b, dq_t, dq_h,
    BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, DEFER: gl.constexpr,
):  # fmt: skip
    BM: gl.constexpr = 2 * ROWS
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    LINE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = q_s.dtype
    zeros = gl.zeros([ROWS, BN], gl.float32, S)
    step = 0
    for turn in range(_mine(tiles)):
        rank, bh = _at(turn, heads)
        first = T - (rank + 1) * BM
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
        if DEFER:
            dq_next = warpgroup_mma_init(dq_sum)
            for n in range(0, first + BM, BN):
                slot, phase = _slot(step, STAGES)
                before, _ = _slot(step + STAGES - 1, STAGES)
                k = k_s.index(slot)
                mbarrier.wait(k_full.index(slot), phase)
                s = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(slot), phase)
                dp = warpgroup_mma(
                    do, v_s.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True
                )
                s, dq_sum = warpgroup_mma_wait(1, deps=[s, dq_next])
                mbarrier.arrive(free.index(before), count=1, pred=n > 0)
                if n + BN > start:
                    column = n + gl.arange(0, BN, layout=gl.SliceLayout(0, S))[None, :]
                    s = gl.where(row[:, None] >= column, s, float("-inf"))
                p = gl.exp2(s * slope - lse_row[:, None])
                dp = warpgroup_mma_wait(0, deps=[dp])
                low = gl.convert_layout((p * (dp - delta_row[:, None])).to(dtype), P)
                dq_next = warpgroup_mma(low, k, dq_sum, is_async=True)
                step += 1
            dq_sum = warpgroup_mma_wait(0, deps=[dq_next])
            mbarrier.arrive(free.index(_slot(step - 1, STAGES)[0]), count=1)
        else:
            for n in range(0, first + BM, BN):
                slot, phase = _slot(step, STAGES)
                k = k_s.index(slot)
                mbarrier.wait(k_full.index(slot), phase)
                s = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(slot), phase)
                dp = warpgroup_mma(
                    do, v_s.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True
                )
                s = warpgroup_mma_wait(1, deps=[s])
                if n + BN > start:
                    column = n + gl.arange(0, BN, layout=gl.SliceLayout(0, S))[None, :]
                    s = gl.where(row[:, None] >= column, s, float("-inf"))
                p = gl.exp2(s * slope - lse_row[:, None])
                dp = warpgroup_mma_wait(0, deps=[dp])
                low = gl.convert_layout((p * (dp - delta_row[:, None])).to(dtype), P)
                dq_next = warpgroup_mma(low, k, dq_sum, is_async=True)
                dq_sum, low = warpgroup_mma_wait(0, deps=[dq_next, low])
                mbarrier.arrive(free.index(slot), count=1)
                step += 1
        mbarrier.arrive(q_free.index(C), count=1)
        at = (start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, A))).to(gl.int64)
        column_A = gl.arange(0, D, layout=gl.SliceLayout(0, A))[None, :]
        to = dq + batch * dq_b + head * dq_h + (at * dq_t)[:, None] + column_A
        gl.store(to, (dq_sum * scale).to(dq.dtype.element_ty))


@gluon.jit(do_not_specialize=("H", "G", "tiles", "heads"))
def queries_kernel(
    q_desc, k_desc, v_desc, do_desc, o, lse, delta, dq, slope, scale,
    T, H, G, tiles, heads, dq_b, dq_t, dq_h,
    BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, DEFER: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """dq for 128 queries of one head at a time, and their delta = sum(do o)."""
    dtype: gl.constexpr = q_desc.dtype
    q_s = gl.allocate_shared_memory(dtype, [2, ROWS, D], q_desc.layout)
    do_s = gl.allocate_shared_memory(dtype, [2, ROWS, D], do_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, BN, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, BN, D], v_desc.layout)
    q_full, q_free = _barriers(2, 1), _barriers(2, 1)
    k_full, v_full, free = _barriers(STAGES, 1), _barriers(STAGES, 1), _barriers(STAGES, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_queries_products, (0, o, lse, delta, dq, q_s, do_s, k_s, v_s, q_full, q_free, k_full,
                                 v_full, free, slope, scale, T, H, G, tiles, heads,
                                 dq_b, dq_t, dq_h, BN, D, STAGES, DEFER)),
            (_queries_products, (1, o, lse, delta, dq, q_s, do_s, k_s, v_s, q_full, q_free, k_full,
                                 v_full, free, slope, scale, T, H, G, tiles, heads,
                                 dq_b, dq_t, dq_h, BN, D, STAGES, DEFER)),
            (_queries_copies, (q_desc, k_desc, v_desc, do_desc, q_s, do_s, k_s, v_s, q_full, q_free,
                               k_full, v_full, free, T, H, G, tiles, heads, BN, D, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
