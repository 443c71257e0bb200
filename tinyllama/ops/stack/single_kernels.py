"""A block in one launch forward and in one backward: the kernels of `stack`'s provider `single`.

The tiles of a phase are what the programs of one launch of `tinyllama.ops.stack.kernels` or of
`tinyllama.ops.attention.kernels` do, and the same code. The programs of a launch are in ``groups``
groups; a group takes one sequence after the other, each as a problem of its own (n_rows = T), and
has a counter for its barriers, at counters[APART * group]. Program i of a group of P takes the
tiles i, i + P, ... of each phase. Names as in these files; QM QN KM KN: blocks of attention. WHOLE:
they divide T; EVEN: the tiles of all products divide all sizes.
"""

from __future__ import annotations

from tinyllama.harness.kernels import jit, tl
from tinyllama.harness.kernels.grid_barrier import ALL, APART, meet
from tinyllama.ops.attention.kernels import forward_kernel, keys, queries
from tinyllama.ops.stack.kernels import (
    gate_up_kernel,
    hidden_gradient_kernel,
    norm_gradient_kernel,
    product_kernel,
    qkv_kernel,
    residual_kernel,
)
from tinyllama.ops.stack.tile_kernels import place, store_tile

LINE: tl.constexpr = tl.constexpr(APART)


@jit
def _within(size, tile, code):
    """The size, as a value that no compiler takes out of the loop over tiles: what would be
    computed from it before the loop, for every phase, leaves no registers."""
    return size * (tile != -code).to(tl.int32)


@jit
def _spoil(
    program, y, n_rows, n_columns, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Make a tile of y (n_rows n_columns) NaN."""
    m, n = place(program, n_rows, n_columns, BM, BN, GROUP)
    nothing = tl.full((BM, BN), float("nan"), tl.float32)
    store_tile(y, nothing, m * BM, n * BN, n_columns, n_rows, n_columns, BM, BN, False)


@jit
def single_forward_kernel(
    low_1, w_qkv, squares_1, rstd, cos, sin, qkv, o, lse, w_out, x, total, gain, low_2, squares_2,
    w_gate_up, gate_up, h, w_down, y, after_gain, after_low, after_squares,
    counters, status, code, spins, eps, slope, B, T, width, H, G, hidden, n_parts_1, groups,
    PARTS_1: tl.constexpr, PARTS: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    QM: tl.constexpr, QN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """y (B*T D) of a block, and what its backward reads. Phases: 0 q, k, v; 1 attention; 2 w_o,
    residual; 3 gate and up; 4 w_down, residual, and low for the next block (None behind the last).
    rstd (2 B*T): of the two norms."""
    group, first = tl.program_id(0) % groups, tl.program_id(0) // groups
    programs = tl.num_programs(0) // groups
    counter = counters + group * LINE
    heads, n_columns, n_parts = H * K, (H + 2 * G) * K, tl.cdiv(width, BN)
    down = tl.cdiv(T, BM)
    opened, met = 1, 0
    for sequence in range(group, B, groups):
        row = tl.cast(sequence, tl.int64) * T
        if PHASE == ALL or PHASE == 0:
            for tile in range(first, down * tl.cdiv(n_columns, BN) * opened, programs):
                D_, E_ = _within(width, tile, code), _within(n_columns, tile, code)
                qkv_kernel(
                    low_1 + row * D_, w_qkv, squares_1 + row * n_parts_1, rstd + row, cos, sin,
                    qkv + row * E_, eps, T, D_, E_, (H + G) * K, T, K // 2,
                    n_parts_1, PARTS_1, BM, BN, BK, GROUP, EVEN, PRECISION, False,
                    program=tl.cast(tile, tl.int32),
                )  # fmt: skip
        if PHASE == ALL:
            met += programs
            opened = meet(counter, met, spins, status, code, opened)
        if PHASE == ALL or PHASE == 1:
            blocks = tl.cdiv(T, QM) * H
            for tile in range(first, blocks * opened, programs):
                forward_kernel(
                    qkv, qkv + heads, qkv + (heads + G * K), o, lse, slope, T, H, G,
                    T * n_columns, n_columns, K, T * n_columns, n_columns, K,
                    T * n_columns, n_columns, K, K, D, WHOLE, SPLIT, QM, QN, PRECISION,
                    program=tl.cast(sequence * blocks + tile, tl.int32),
                )  # fmt: skip
        if PHASE == ALL:
            met += programs
            opened = meet(counter, met, spins, status, code + 1, opened)
        if PHASE == ALL or PHASE == 2:
            for tile in range(first, down * n_parts * opened, programs):
                D_, Q_ = _within(width, tile, code), _within(heads, tile, code)
                residual_kernel(
                    o + row * Q_, w_out, x + row * D_, gain, total + row * D_,
                    low_2 + row * D_, squares_2 + row * n_parts, T, D_, Q_, n_parts,
                    BM, BN, BK, GROUP, EVEN, PRECISION, False, program=tl.cast(tile, tl.int32),
                )  # fmt: skip
        if PHASE == ALL:
            met += programs
            opened = meet(counter, met, spins, status, code + 2, opened)
        if PHASE == ALL or PHASE == 3:
            for tile in range(first, down * tl.cdiv(hidden, BN // 2) * opened, programs):
                D_, F_ = _within(width, tile, code), _within(hidden, tile, code)
                gate_up_kernel(
                    low_2 + row * D_, w_gate_up, squares_2 + row * n_parts,
                    rstd + (tl.cast(B, tl.int64) * T + row), gate_up + row * 2 * F_,
                    h + row * F_, eps, T, D_, F_, n_parts, PARTS,
                    BM, BN, BK, GROUP, EVEN, PRECISION, False, program=tl.cast(tile, tl.int32),
                )  # fmt: skip
        if PHASE == ALL:
            met += programs
            opened = meet(counter, met, spins, status, code + 3, opened)
        if PHASE == ALL or PHASE == 4:
            low, squares = after_low, after_squares
            if after_gain is not None:
                low += row * width
                squares += row * n_parts
            for tile in range(first, down * n_parts * opened, programs):
                D_, F_ = _within(width, tile, code), _within(hidden, tile, code)
                residual_kernel(
                    h + row * F_, w_down, total + row * D_, after_gain, y + row * D_,
                    low, squares, T, D_, F_, n_parts,
                    BM, BN, BK, GROUP, EVEN, PRECISION, False, program=tl.cast(tile, tl.int32),
                )  # fmt: skip
        for tile in range(first, down * n_parts * (1 - opened), programs):
            _spoil(tl.cast(tile, tl.int32), y + row * width, T, width, BM, BN, GROUP)


@jit
def single_backward_kernel(
    dy_low, w_down, gate_up, rstd, dgate_up, parts, w_gate_up, total, mlp_gain, dy, dsum, dsum_low,
    mlp_dgain, dout, w_out, do, qkv, o, lse, cos, sin, dqkv, per_head, w_qkv, x, attention_gain,
    dx, dx_low, attention_dgain,
    counters, status, code, spins, slope, scale, B, T, width, H, G, hidden, groups,
    PARTS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    QM: tl.constexpr, QN: tl.constexpr, KM: tl.constexpr, KN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """dx (B*T D) of a block, and the gradients that its weights' are made of. Phases: 0 gate and
    up; 1 the second norm; 2 w_o; 3 attention; 4 the first norm. dsum_low: dsum in the products'
    dtype, or None where it is dsum's; dout is whichever of the two the products read."""
    group, first = tl.program_id(0) % groups, tl.program_id(0) // groups
    programs = tl.num_programs(0) // groups
    counter = counters + group * LINE
    heads, n_columns, n_parts = H * K, (H + 2 * G) * K, tl.cdiv(hidden, BN)
    down, across = tl.cdiv(T, BM), tl.cdiv(width, BN)
    opened, met = 1, 0
    for sequence in range(group, B, groups):
        row = tl.cast(sequence, tl.int64) * T
        shares = tl.cast(sequence, tl.int64) * down * width  # of the gains' gradients
        rstd_2 = rstd + (tl.cast(B, tl.int64) * T + row)
        if PHASE == ALL or PHASE == 0:
            for tile in range(first, down * n_parts * opened, programs):
                D_, F_ = _within(width, tile, code), _within(hidden, tile, code)
                hidden_gradient_kernel(
                    dy_low + row * D_, w_down, gate_up + row * 2 * F_, rstd_2,
                    dgate_up + row * 2 * F_, parts + row * n_parts, T, D_, F_, n_parts,
                    BM, BN, BK, GROUP, EVEN, PRECISION, False, program=tl.cast(tile, tl.int32),
                )  # fmt: skip
        if PHASE == ALL:
            met += programs
            opened = meet(counter, met, spins, status, code, opened)
        if PHASE == ALL or PHASE == 1:
            low = dsum_low
            if dsum_low is not None:
                low += row * width
            for tile in range(first, down * across * opened, programs):
                D_, F_ = _within(width, tile, code), _within(hidden, tile, code)
                norm_gradient_kernel(
                    dgate_up + row * 2 * F_, w_gate_up, parts + row * n_parts, rstd_2,
                    total + row * D_, mlp_gain, dy + row * D_, dsum + row * D_, low,
                    mlp_dgain + shares, T, D_, 2 * F_, n_parts, PARTS,
                    BM, BN, BK, GROUP, EVEN, PRECISION, False, program=tl.cast(tile, tl.int32),
                )  # fmt: skip
        if PHASE == ALL:
            met += programs
            opened = meet(counter, met, spins, status, code + 1, opened)
        if PHASE == ALL or PHASE == 2:
            for tile in range(first, down * tl.cdiv(heads, BN) * opened, programs):
                D_, Q_ = _within(width, tile, code), _within(heads, tile, code)
                product_kernel(
                    dout + row * D_, w_out, do + row * Q_, T, Q_, D_,
                    BM, BN, BK, GROUP, EVEN, PRECISION, False, program=tl.cast(tile, tl.int32),
                )  # fmt: skip
        if PHASE == ALL:
            met += programs
            opened = meet(counter, met, spins, status, code + 2, opened)
        if PHASE == ALL or PHASE == 3:
            for_keys, for_queries = tl.cdiv(T, KN) * G, tl.cdiv(T, QM) * H
            k, v = qkv + heads, qkv + (heads + G * K)
            dk, dv = dqkv + heads, dqkv + (heads + G * K)
            for tile in range(first, for_keys * opened, programs):
                token = _within(n_columns, tile, code)
                batch, wide = T * token, _within(heads, tile, code)
                keys(
                    tl.cast(sequence * for_keys + tile, tl.int32), qkv, k, v, o, do, lse,
                    None, None, None, 0, cos, sin, dk, dv, rstd, per_head, slope, scale, T, H, G,
                    batch, token, K, batch, token, K, batch, token, K, T * wide, wide, K,
                    batch, token, K, batch, token, K,
                    K, D, WHOLE, SPLIT, KM, KN, PRECISION, False, False,
                )  # fmt: skip
            taken = tl.cdiv(tl.maximum(for_keys - first, 0), programs)
            for tile in range(first + taken * programs - for_keys, for_queries * opened, programs):
                token = _within(n_columns, tile, code)
                batch, wide = T * token, _within(heads, tile, code)
                queries(
                    tl.cast(sequence * for_queries + tile, tl.int32), qkv, k, v, o, do, lse,
                    None, None, 0, cos, sin, dqkv, rstd, per_head, slope, scale, T, H, G,
                    batch, token, K, batch, token, K, batch, token, K, T * wide, wide, K,
                    batch, token, K,
                    K, D, WHOLE, SPLIT, QM, QN, PRECISION, False,
                )  # fmt: skip
        if PHASE == ALL:
            met += programs
            opened = meet(counter, met, spins, status, code + 3, opened)
        if PHASE == ALL or PHASE == 4:
            below = dx_low
            if dx_low is not None:
                below += row * width
            for tile in range(first, down * across * opened, programs):
                D_, E_ = _within(width, tile, code), _within(n_columns, tile, code)
                norm_gradient_kernel(
                    dqkv + row * E_, w_qkv, per_head + row * (H + G), rstd + row,
                    x + row * D_, attention_gain, dsum + row * D_, dx + row * D_, below,
                    attention_dgain + shares, T, D_, E_, H + G, HEADS,
                    BM, BN, BK, GROUP, EVEN, PRECISION, False, program=tl.cast(tile, tl.int32),
                )  # fmt: skip
        for tile in range(first, down * across * (1 - opened), programs):
            _spoil(tl.cast(tile, tl.int32), dx + row * width, T, width, BM, BN, GROUP)
