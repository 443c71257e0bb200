"""Causal flash attention with specialised warps, in Gluon: long sequences of `attention`.

A program has three parts, each with warps and registers of its own: one copies tiles to shared
memory (TMA), two multiply (wgmma), 64 rows each. While one of these computes exponentials the other
multiplies. There are as many programs as processors, and each takes one tile after another, the
longest first and every second round in reverse, so that their sums are alike. No program adds to
what another one writes: equal inputs give equal bits.

Matrices are descriptors of (B T, heads D) with blocks of 64 rows, or of the STEP rows that a step
takes; lse and delta are (B H T), float32. T is a multiple of 128; the head dimension D is 64 or
128. Barriers come in pairs: "full" says that what a slot of shared memory holds has arrived, "free"
that it may be overwritten. See `tinyllama.ops.attention.kernels` for the mathematics and the names.
"""

from tinyllama.harness.kernels.gluon import (
    fence_async_shared,
    gl,
    jit,
    load_tile,
    mbarrier,
    store_tile,
    wait_for_stores,
    warpgroup_mma,
    warpgroup_mma_wait,
)

WARPS = 4  # of a part that multiplies: a warp group
ROWS = gl.constexpr(64)  # that it multiplies at a time
TILE = gl.constexpr(128)  # of a program: of two warp groups
LOWEST = gl.constexpr(-1.0e30)  # below any score: a row whose keys are all masked stays finite
COUNTS = ("H", "G", "tiles", "heads")


@jit
def mine(tiles):
    """How many tiles this program takes."""
    programs = gl.num_programs(0)
    full = tiles // programs
    program = gl.program_id(0)
    last = gl.where(full % 2 == 0, program, programs - 1 - program)
    return full + gl.where(last < tiles % programs, 1, 0)


@jit
def at_turn(turn, heads):
    """The rank of the tile's length, and its batch and head in one, at a program's turn."""
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    index = turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)
    return index // heads, index % heads


@jit
def slot_of(step, STAGES: gl.constexpr):
    return step % STAGES, (step // STAGES) & 1


@jit
def barriers(N: gl.constexpr, COUNT: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


# -- forward ----------------------------------------------------------------------------------


@jit
def _forward_copies(
    q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, q_free, k_full, k_free, v_full, v_free,
    T, H, G, tiles, heads, STEP: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    step = 0
    for turn in range(mine(tiles)):
        rank, bh = at_turn(turn, heads)
        start = T - (rank + 1) * TILE
        row = bh // H * T
        head = bh % H
        group = head // (H // G)
        blocks = (start + TILE) // STEP
        for i in range(blocks):
            n = row + (blocks - 1 - i) * STEP
            slot, phase = slot_of(step, STAGES)
            mbarrier.wait(k_free.index(slot), phase ^ 1)
            mbarrier.expect(k_full.index(slot), STEP * D * 2)
            load_tile(k_desc, [n, group * D], k_full.index(slot), k_s.index(slot))
            if i == 0:
                for c in gl.static_range(2):
                    mbarrier.wait(q_free.index(c), (turn & 1) ^ 1)
                    mbarrier.expect(q_full.index(c), ROWS * D * 2)
                    load_tile(
                        q_desc, [row + start + c * ROWS, head * D], q_full.index(c), q_s.index(c)
                    )
            mbarrier.wait(v_free.index(slot), phase ^ 1)
            mbarrier.expect(v_full.index(slot), STEP * D * 2)
            load_tile(v_desc, [n, group * D], v_full.index(slot), v_s.index(slot))
            step += 1


@jit
def _softmax(s, highest, total, slope, row, n, MASK, STEP: gl.constexpr, S: gl.constexpr):
    """-> weights, the new highest and total, and the factor of what was summed before."""
    if MASK:
        column = n + gl.arange(0, STEP, layout=gl.SliceLayout(0, S))[None, :]
        s = gl.where(row[:, None] >= column, s, float("-inf"))
    raised = gl.maximum(highest, gl.max(s, 1) * slope)
    p = gl.exp2(s * slope - raised[:, None])
    shrink = gl.exp2(highest - raised)
    return p, raised, total * shrink + gl.sum(p, 1), shrink


@jit
def _forward_products(
    C: gl.constexpr, o_desc, lse, q_s, k_s, v_s, q_full, q_free, k_full, k_free, v_full, v_free,
    slope, T, H, G, tiles, heads, STEP: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    dtype: gl.constexpr = q_s.dtype
    zeros = gl.zeros([ROWS, STEP], gl.float32, S)
    step = 0
    for turn in range(mine(tiles)):
        rank, bh = at_turn(turn, heads)
        start = T - (rank + 1) * TILE
        blocks = (start + TILE) // STEP
        row = start + C * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
        q = q_s.index(C)
        o = gl.zeros([ROWS, D], gl.float32, A)
        highest = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, S))
        total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S))
        mbarrier.wait(q_full.index(C), turn & 1)
        # The scores of a block are made under the softmax of the one before it.
        slot, phase = slot_of(step, STAGES)
        mbarrier.wait(k_full.index(slot), phase)
        s = warpgroup_mma(q, k_s.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_free.index(slot), count=1)
        n = (blocks - 1) * STEP
        p, highest, total, _ = _softmax(s, highest, total, slope, row, n, True, STEP, S)
        low = gl.convert_layout(p.to(dtype), P)
        for i in range(1, blocks):
            before, phase_before = slot_of(step, STAGES)
            step += 1
            slot, phase = slot_of(step, STAGES)
            k = k_s.index(slot).permute((1, 0))
            mbarrier.wait(k_full.index(slot), phase)
            s = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(before), phase_before)
            o_next = warpgroup_mma(low, v_s.index(before), o, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s])
            mbarrier.arrive(k_free.index(slot), count=1)
            n = (blocks - 1 - i) * STEP
            p, highest, total, shrink = _softmax(
                s, highest, total, slope, row, n, i < TILE // STEP, STEP, S
            )
            o, low = warpgroup_mma_wait(0, deps=[o_next, low])
            mbarrier.arrive(v_free.index(before), count=1)
            o = o * gl.convert_layout(shrink, gl.SliceLayout(1, A))[:, None]
            low = gl.convert_layout(p.to(dtype), P)
        slot, phase = slot_of(step, STAGES)
        mbarrier.wait(v_full.index(slot), phase)
        o = warpgroup_mma(low, v_s.index(slot), o, is_async=True)
        o, low = warpgroup_mma_wait(0, deps=[o, low])
        mbarrier.arrive(v_free.index(slot), count=1)
        step += 1
        gl.store(lse + bh * T + row, highest + gl.log2(total))
        o = o / gl.convert_layout(total, gl.SliceLayout(1, A))[:, None]
        q.store(o.to(dtype))  # all products with q are done
        fence_async_shared()
        store_tile(o_desc, [bh // H * T + start + C * ROWS, bh % H * D], q)
        wait_for_stores(0)
        mbarrier.arrive(q_free.index(C), count=1)


@jit(unspecialised=COUNTS)
def specialised_forward_kernel(
    q_desc, k_desc, v_desc, o_desc, lse, slope, T, H, G, tiles, heads,
    STEP: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """o and lse for 128 queries of one head at a time."""
    dtype: gl.constexpr = q_desc.dtype
    q_s = gl.allocate_shared_memory(dtype, [2, ROWS, D], q_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, STEP, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, STEP, D], v_desc.layout)
    q_full, q_free = barriers(2, 1), barriers(2, 1)
    k_full, k_free = barriers(STAGES, 1), barriers(STAGES, 2)
    v_full, v_free = barriers(STAGES, 1), barriers(STAGES, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_forward_products, (0, o_desc, lse, q_s, k_s, v_s, q_full, q_free, k_full, k_free,
                                 v_full, v_free, slope, T, H, G, tiles, heads, STEP, D, STAGES)),
            (_forward_products, (1, o_desc, lse, q_s, k_s, v_s, q_full, q_free, k_full, k_free,
                                 v_full, v_free, slope, T, H, G, tiles, heads, STEP, D, STAGES)),
            (_forward_copies, (q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, q_free, k_full,
                               k_free, v_full, v_free, T, H, G, tiles, heads, STEP, D, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
