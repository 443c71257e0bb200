"""Products with everything else in their epilogues: the kernels of `stack`.

A norm costs no launch. Forward, the kernel that makes x also writes low = x gain and, for each of
its tiles, the sums of x^2 over the tile's columns; the next product multiplies its rows by
rstd = 1 / rms(x). Backward, with dY scaled by rstd and c = sum(dY Y) over a row of Y = norm(x) W^T,

    dx = gain (dY W) - x rstd c / D,      dgain = sum over rows of (dY W) x,      dW = dY^T low

(the algebra of CODA, arXiv 2605.19269). Sums over a row or a column of tiles go through memory, one
number for each tile, and are added in one order: equal inputs give equal bits.

Shape suffixes as in `tinyllama.ops`; E = Q + 2 R; BM, BN, BK, EVEN and DESCRIBED as in
`tinyllama.ops.stack.tile_kernels`. Called by another kernel, one does the work of its program
number ``program``.

Some matrix units read float32 operands along the inner axis of a product alone. There, what a
gradient of weights will read is stored a second time as its transpose (names in ``_turned``, None
where it is not wanted), and TURNED kernels of the backward pass read transposes: W^T for
dX = dY W, and dY^T and X^T for dW = dY^T X.
"""

from __future__ import annotations

from tinyllama.harness.kernels import begin, jit, let_next_start, tl, wait_for_last
from tinyllama.harness.kernels.tf32 import to_tf32
from tinyllama.ops.silu_mul import sigmoids
from tinyllama.ops.stack.tile_kernels import (
    halves,
    load_tile,
    load_vector,
    place,
    prefetch,
    row_sums,
    store_tile,
    store_turned,
    tile_product,
)

# -- forward --------------------------------------------------------------------------------------


@jit
def fold_kernel(
    x, gain, low, squares, n_rows, width, delta, total, rstd, eps, counters, n_counters,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr = False, low_turned=None,
):  # fmt: skip
    """low = x gain, and the sum of x^2 of each row, where no product of ours made x. Where rstd is
    given it is written, and low is times it. Where delta is given, total = x + delta, and low is
    that of total. Without a gain, low = x. The first program sets the counters to 0."""
    begin(PDL)
    if counters is not None:
        past_first = tl.minimum(
            tl.program_id(0), 1
        )  # 32 bits do not hold a program times n_counters
        for first in range(past_first * n_counters, n_counters, 1024):
            at = first + tl.arange(0, 1024)
            tl.store(counters + at, tl.zeros((1024,), tl.int32), mask=at < n_counters)
    row = tl.program_id(0) * ROWS
    wide = load_tile(x, row, 0, width, n_rows, width, ROWS, WIDTH, False).to(tl.float32)
    if delta is not None:
        more = load_tile(delta, row, 0, width, n_rows, width, ROWS, WIDTH, False)
        rounded = (wide + more.to(tl.float32)).to(total.dtype.element_ty)
        store_tile(total, rounded, row, 0, width, n_rows, width, ROWS, WIDTH, False)
        wide = rounded.to(tl.float32)
    if gain is not None:
        rows, sums = row + tl.arange(0, ROWS), tl.sum(wide * wide, 1)
        if rstd is None:
            tl.store(squares + rows, sums, mask=rows < n_rows)
        else:
            scale = tl.rsqrt(sums / width + eps)
            tl.store(rstd + rows, scale, mask=rows < n_rows)
            wide *= scale[:, None]
        wide *= load_vector(gain, 0, width, WIDTH, False)[None, :]
    store_tile(low, wide, row, 0, width, n_rows, width, ROWS, WIDTH, False)
    if low_turned is not None:
        store_turned(low_turned, wide, row, 0, n_rows, width, ROWS, WIDTH, False)


@jit
def _scale(
    squares, rstd, row, tile_column, eps, n_rows, width, n_parts,
    ROWS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """1 / rms of the rows; the tiles of the first column keep it for the backward pass."""
    total = row_sums(squares, row, n_rows, n_parts, ROWS, PARTS)
    scale = tl.rsqrt(total / width + eps)
    if tile_column == 0:
        rows = row + tl.arange(0, ROWS)
        tl.store(rstd + rows, scale, mask=rows < n_rows)
    return scale


@jit
def qkv_kernel(
    low, w, squares, rstd, cos, sin, qkv, eps, n_rows, width, n_columns, rotated, length, pairs,
    n_parts,
    PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, DESCRIBED: tl.constexpr,
    PDL: tl.constexpr = False, program=None, qkv_turned=None,
):  # fmt: skip
    """qkv (N E) = norm(x) W^T with W (E D), whose first ``rotated`` columns, q and k, are rotated
    by the tables (T C), C = ``pairs``."""
    begin(PDL)
    m, n = place(program, n_rows, n_columns, BM, BN, GROUP)
    row, column = m * BM, n * BN
    acc = tile_product(
        low, w, row, column, n_rows, n_columns, width, width, width,
        True, False, BM, BN, BK, EVEN, PRECISION, DESCRIBED,
    )  # fmt: skip
    acc *= _scale(squares, rstd, row, n, eps, n_rows, width, n_parts, BM, PARTS)[:, None]
    if column < rotated:
        time = (row + tl.arange(0, BM)) % length
        pair = column // 2 + tl.arange(0, BN // 2)
        at = time.to(tl.int64)[:, None] * pairs + (pair % pairs)[None, :]
        turns = (pair < rotated // 2)[None, :]
        cosine = tl.load(cos + at, mask=turns, other=1.0).to(tl.float32)
        sine = tl.load(sin + at, mask=turns, other=0.0).to(tl.float32)
        even, odd = tl.split(tl.reshape(acc, (BM, BN // 2, 2)))
        turned = tl.join(even * cosine - odd * sine, even * sine + odd * cosine)
        acc = tl.reshape(turned, (BM, BN))
    if PRECISION == "tf32":  # attention reads it as it is
        acc = to_tf32(acc)
    store_tile(qkv, acc, row, column, n_columns, n_rows, n_columns, BM, BN, EVEN)
    if qkv_turned is not None:
        store_turned(qkv_turned, acc, row, column, n_rows, n_columns, BM, BN, EVEN)


@jit
def gate_up_kernel(
    low, w, squares, rstd, gate_up, h, eps, n_rows, width, n_hidden, n_parts,
    PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, DESCRIBED: tl.constexpr,
    PDL: tl.constexpr = False, program=None, h_turned=None,
):  # fmt: skip
    """gate_up (N 2F) = norm(x) [W_gate; W_up]^T, and h (N F) = silu(gate) up. A tile has BN / 2
    columns of the gate and the same of up; up's weights lie behind the gate's (2F D)."""
    begin(PDL)
    HALF: tl.constexpr = BN // 2
    m, n = place(program, n_rows, n_hidden, BM, HALF, GROUP)
    row, column = m * BM, n * HALF
    acc = tile_product(
        low, w, row, column, n_rows, n_hidden, width, width, width,
        True, True, BM, BN, BK, EVEN, PRECISION, DESCRIBED,
    )  # fmt: skip
    acc *= _scale(squares, rstd, row, n, eps, n_rows, width, n_parts, BM, PARTS)[:, None]
    gate, up = halves(acc, BM, HALF)
    gate, up = gate.to(gate_up.dtype.element_ty), up.to(gate_up.dtype.element_ty)
    stride = 2 * n_hidden
    store_tile(gate_up, gate, row, column, stride, n_rows, n_hidden, BM, HALF, EVEN)
    store_tile(gate_up + n_hidden, up, row, column, stride, n_rows, n_hidden, BM, HALF, EVEN)
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    sigmoid, _ = sigmoids(gate)
    store_tile(h, gate * sigmoid * up, row, column, n_hidden, n_rows, n_hidden, BM, HALF, EVEN)
    if h_turned is not None:
        hidden = gate * sigmoid * up
        store_turned(h_turned, hidden, row, column, n_rows, n_hidden, BM, HALF, EVEN)


@jit
def residual_kernel(
    a, w, x, gain, total, low, squares, n_rows, width, inner, n_parts,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, DESCRIBED: tl.constexpr,
    PDL: tl.constexpr = False, FETCH: tl.constexpr = False, program=None,
    low_turned=None,
):  # fmt: skip
    """total (N D) = x + a W^T with W (D inner). Where a gain is given, low = total gain, and
    squares (N n_parts) the sums of total^2 over each tile's columns."""
    let_next_start(PDL)
    m, n = place(program, n_rows, width, BM, BN, GROUP)
    row, column = m * BM, n * BN
    if PDL and FETCH:
        prefetch(x, row, column, width, n_rows, width, BM, BN)
    wait_for_last(PDL)
    acc = tile_product(
        a, w, row, column, n_rows, width, inner, inner, inner,
        True, False, BM, BN, BK, EVEN, PRECISION, DESCRIBED,
    )  # fmt: skip
    acc += load_tile(x, row, column, width, n_rows, width, BM, BN, EVEN).to(tl.float32)
    rounded = acc.to(total.dtype.element_ty)
    store_tile(total, rounded, row, column, width, n_rows, width, BM, BN, EVEN)
    if gain is not None:
        wide = rounded.to(tl.float32)  # the norm is that of the sum as it is stored
        gains = load_vector(gain, column, width, BN, EVEN)
        store_tile(low, wide * gains[None, :], row, column, width, n_rows, width, BM, BN, EVEN)
        if low_turned is not None:
            low_tile = wide * gains[None, :]
            store_turned(low_turned, low_tile, row, column, n_rows, width, BM, BN, EVEN)
        rows = row + tl.arange(0, BM)
        places = squares + rows.to(tl.int64) * n_parts + n
        tl.store(places, tl.sum(wide * wide, 1), mask=rows < n_rows)


# -- backward -------------------------------------------------------------------------------------


@jit
def _activation_gradient(
    dh, gate_up, dgate_up, turned, row, column, n_rows, n_hidden,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Store dgate and dup (BM BN) for dh, and where ``turned`` (2F N) is given their transposes;
    -> the row sums of their products with gate and up."""
    stride = 2 * n_hidden
    gate = load_tile(gate_up, row, column, stride, n_rows, n_hidden, BM, BN, EVEN).to(tl.float32)
    up = load_tile(gate_up + n_hidden, row, column, stride, n_rows, n_hidden, BM, BN, EVEN)
    sigmoid, rest = sigmoids(gate)
    dup = dh * gate * sigmoid
    if turned is not None:
        below = turned + tl.cast(n_hidden, tl.int64) * n_rows
    store_tile(dgate_up + n_hidden, dup, row, column, stride, n_rows, n_hidden, BM, BN, EVEN)
    if turned is not None:
        store_turned(below, dup, row, column, n_rows, n_hidden, BM, BN, EVEN)
    up = up.to(tl.float32)
    dgate = dh * up * sigmoid * (1 + gate * rest)
    store_tile(dgate_up, dgate, row, column, stride, n_rows, n_hidden, BM, BN, EVEN)
    if turned is not None:
        store_turned(turned, dgate, row, column, n_rows, n_hidden, BM, BN, EVEN)
    return tl.sum(dgate * gate + dup * up, 1)


@jit
def _by_slices(
    dh, gate_up, dgate_up, turned, row, column, n_rows, n_hidden,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """`_activation_gradient`, half of the columns after the other where they are many and stored
    twice."""
    if turned is not None and BM * BN >= 4096:
        left, right = halves(dh, BM, BN // 2)
        total = _activation_gradient(
            left, gate_up, dgate_up, turned, row, column, n_rows, n_hidden, BM, BN // 2, EVEN
        )
        total += _activation_gradient(
            right, gate_up, dgate_up, turned, row, column + BN // 2, n_rows, n_hidden,
            BM, BN // 2, EVEN,
        )  # fmt: skip
    else:
        total = _activation_gradient(
            dh, gate_up, dgate_up, turned, row, column, n_rows, n_hidden, BM, BN, EVEN
        )
    return total


@jit
def hidden_gradient_kernel(
    dy, w, gate_up, rstd, dgate_up, parts, n_rows, width, n_hidden, n_parts,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, DESCRIBED: tl.constexpr,
    PDL: tl.constexpr = False, FETCH: tl.constexpr = False, program=None,
    TURNED: tl.constexpr = False, dgate_up_turned=None,
):  # fmt: skip
    """dgate_up (N 2F), times rstd, of h = silu(gate) up and dh = dy W with W (D F; (F D) where
    TURNED); and parts
    (N n_parts): the tile's share of sum(dgate_up gate_up) over a row."""
    let_next_start(PDL)
    m, n = place(program, n_rows, n_hidden, BM, BN, GROUP)
    row, column = m * BM, n * BN
    if PDL and FETCH:
        stride = 2 * n_hidden
        prefetch(gate_up, row, column, stride, n_rows, n_hidden, BM, BN)
        prefetch(gate_up + n_hidden, row, column, stride, n_rows, n_hidden, BM, BN)
    wait_for_last(PDL)
    acc = tile_product(
        dy, w, row, column, n_rows, n_hidden, width, width, width if TURNED else n_hidden,
        TURNED, False, BM, BN, BK, EVEN, PRECISION, DESCRIBED,
    )  # fmt: skip
    acc *= load_vector(rstd, row, n_rows, BM, EVEN)[:, None]
    HALF: tl.constexpr = BN // 2  # at a time, so that registers suffice
    left, right = halves(acc, BM, HALF)
    total = _by_slices(
        left, gate_up, dgate_up, dgate_up_turned, row, column, n_rows, n_hidden, BM, HALF, EVEN
    )
    total += _by_slices(
        right, gate_up, dgate_up, dgate_up_turned, row, column + HALF, n_rows, n_hidden,
        BM, HALF, EVEN,
    )  # fmt: skip
    rows = row + tl.arange(0, BM)
    places = parts + rows.to(tl.int64) * n_parts + n
    tl.store(places, total, mask=rows < n_rows)


@jit
def norm_gradient_kernel(
    dy, w, parts, rstd, x, gain, dresidual, dx, dx_low, dgain, n_rows, width, inner, n_parts,
    PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, DESCRIBED: tl.constexpr,
    PDL: tl.constexpr = False, FETCH: tl.constexpr = False, program=None,
    SCALED: tl.constexpr = True, TURNED: tl.constexpr = False, dx_turned=None,
):  # fmt: skip
    """dx (N D) = dresidual + gain (dy W) - x rstd c / D with W (inner D; (D inner) where TURNED),
    dy times rstd and c the row sums of parts; the same in the products' dtype where dx_low is not
    None; and for each tile of rows the share of dgain. SCALED: dy and parts are times rstd; if not,
    that is done here."""
    let_next_start(PDL)
    m, n = place(program, n_rows, width, BM, BN, GROUP)
    row, column = m * BM, n * BN
    if PDL and FETCH:
        prefetch(x, row, column, width, n_rows, width, BM, BN)
    wait_for_last(PDL)
    acc = tile_product(
        dy, w, row, column, n_rows, width, inner, inner, inner if TURNED else width,
        TURNED, False, BM, BN, BK, EVEN, PRECISION, DESCRIBED,
    )  # fmt: skip
    if not SCALED:
        acc *= load_vector(rstd, row, n_rows, BM, EVEN)[:, None]
    wide = load_tile(x, row, column, width, n_rows, width, BM, BN, EVEN).to(tl.float32)
    share = tl.sum(acc * wide, 0)
    at = column + tl.arange(0, BN)
    tl.store(dgain + m * width + at, share, mask=at < width)
    total = row_sums(parts, row, n_rows, n_parts, BM, PARTS)
    factor = load_vector(rstd, row, n_rows, BM, EVEN) * total / width
    if not SCALED:
        factor *= load_vector(rstd, row, n_rows, BM, EVEN)
    acc = acc * load_vector(gain, column, width, BN, EVEN)[None, :] - wide * factor[:, None]
    acc += load_tile(dresidual, row, column, width, n_rows, width, BM, BN, EVEN).to(tl.float32)
    store_tile(dx, acc, row, column, width, n_rows, width, BM, BN, EVEN)
    if dx_low is not None:
        store_tile(dx_low, acc, row, column, width, n_rows, width, BM, BN, EVEN)
    if dx_turned is not None:
        store_turned(dx_turned, acc, row, column, n_rows, width, BM, BN, EVEN)


@jit
def product_kernel(
    dy, w, dx, n_rows, width, inner,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, DESCRIBED: tl.constexpr,
    PDL: tl.constexpr = False, program=None, TURNED: tl.constexpr = False, dx_turned=None,
):  # fmt: skip
    """dx (N D) = dy W with W (inner D; (D inner) where TURNED)."""
    begin(PDL)
    m, n = place(program, n_rows, width, BM, BN, GROUP)
    row, column = m * BM, n * BN
    acc = tile_product(
        dy, w, row, column, n_rows, width, inner, inner, inner if TURNED else width,
        TURNED, False, BM, BN, BK, EVEN, PRECISION, DESCRIBED,
    )  # fmt: skip
    if PRECISION == "tf32":  # attention reads it as it is
        acc = to_tf32(acc)
    store_tile(dx, acc, row, column, width, n_rows, width, BM, BN, EVEN)
    if dx_turned is not None:
        store_turned(dx_turned, acc, row, column, n_rows, width, BM, BN, EVEN)


@jit
def _first(is_a, is_b, is_c, a, b, c, d):
    """Of a, b, c and d the one of the first condition that holds; d if none does. Not by branches:
    AMD's compiler in triton 3.6 ends on pointers that branches choose."""
    return tl.where(is_a, a, tl.where(is_b, b, tl.where(is_c, c, d)))


@jit
def weight_gradients_kernel(
    dqkv, low_1, dw_qkv, dout, o, dw_out, dgate_up, low_2, dw_gate_up, dy, h, dw_down,
    n_rows, width, n_columns, n_heads, n_hidden, after_qkv, after_out, after_gate_up,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, DESCRIBED: tl.constexpr,
    PDL: tl.constexpr = False, TURNED: tl.constexpr = False,
):  # fmt: skip
    """The gradients of the four matrices of a block, (E D), (D Q), (2F D) and (D F), in one launch:
    each program one tile of dW = dY^T X, over all rows of dY and X. after_qkv, after_out,
    after_gate_up: the programs up to the end of each. One loop serves all four, so that shared
    memory is taken once. TURNED: dY and X are given as their transposes, dY^T and X^T."""
    begin(PDL)
    tile = tl.program_id(0)
    of_qkv, of_out, of_gate_up = tile < after_qkv, tile < after_out, tile < after_gate_up
    n_out = _first(of_qkv, of_out, of_gate_up, n_columns, width, 2 * n_hidden, width)
    n_in = _first(of_qkv, of_out, of_gate_up, width, n_heads, width, n_hidden)
    dw = _first(of_qkv, of_out, of_gate_up, dw_qkv, dw_out, dw_gate_up, dw_down)
    tile -= _first(of_qkv, of_out, of_gate_up, 0, after_qkv, after_out, after_gate_up)
    across = tl.cdiv(n_in, BN)
    row, column = tile // across * BM, tile % across * BN
    acc = tl.zeros((BM, BN), tl.float32)
    if DESCRIBED:
        if of_qkv:
            left, right = dqkv, low_1
        elif of_out:
            left, right = dout, o
        elif of_gate_up:
            left, right = dgate_up, low_2
        else:
            left, right = dy, h
        for first in range(0, n_rows, BK):
            if TURNED:
                left_tile, right_tile = left.load([row, first]), right.load([column, first])
                acc = tl.dot(left_tile, tl.trans(right_tile), acc, input_precision=PRECISION)
            else:
                left_tile, right_tile = left.load([first, row]), right.load([first, column])
                acc = tl.dot(tl.trans(left_tile), right_tile, acc, input_precision=PRECISION)
    elif TURNED:
        left = _first(of_qkv, of_out, of_gate_up, dqkv, dout, dgate_up, dy)
        right = _first(of_qkv, of_out, of_gate_up, low_1, o, low_2, h)
        acc = tile_product(
            left, right, row, column, n_out, n_in, n_rows, n_rows, n_rows,
            True, False, BM, BN, BK, EVEN, PRECISION, False,
        )  # fmt: skip
    else:
        i, j = tl.arange(0, BM)[None, :], tl.arange(0, BN)[None, :]
        k = tl.arange(0, BK)[:, None]
        left = _first(of_qkv, of_out, of_gate_up, dqkv, dout, dgate_up, dy)
        right = _first(of_qkv, of_out, of_gate_up, low_1, o, low_2, h)
        left_at = left + row + (k * tl.cast(n_out, tl.int64) + i)
        right_at = right + column + (k * tl.cast(n_in, tl.int64) + j)
        for first in range(0, n_rows, BK):
            if EVEN:
                left_tile, right_tile = tl.load(left_at), tl.load(right_at)
            else:
                there = k < n_rows - first
                left_tile = tl.load(left_at, mask=there & (i < n_out - row), other=0.0)
                right_tile = tl.load(right_at, mask=there & (j < n_in - column), other=0.0)
            if PRECISION == "tf32":
                left_tile, right_tile = to_tf32(left_tile), to_tf32(right_tile)
            acc = tl.dot(tl.trans(left_tile), right_tile, acc, input_precision=PRECISION)
            left_at += BK * tl.cast(n_out, tl.int64)
            right_at += BK * tl.cast(n_in, tl.int64)
    store_tile(dw, acc, row, column, n_in, n_out, n_in, BM, BN, EVEN)
