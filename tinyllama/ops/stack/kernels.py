"""Products with everything else in their epilogues: the kernels of `stack`.

A norm costs no launch. Forward, the kernel that makes x also writes low = x gain and, for each of
its tiles, the sums of x^2 over the tile's columns; the next product multiplies its rows by
rstd = 1 / rms(x). Backward, with dY scaled by rstd and c = sum(dY Y) over a row of Y = norm(x) W^T,

    dx = gain (dY W) - x rstd c / D,      dgain = sum over rows of (dY W) x,      dW = dY^T low

(the algebra of CODA, arXiv 2605.19269). Sums over a row or a column of tiles go through memory, one
number for each tile, and are added in one order: equal inputs give equal bits.

Shape suffixes as in `tinyllama.ops`; E = Q + 2 R. A tile is (BM BN), a step of a product takes BK
of the inner axis. EVEN: the tiles divide the sizes, and nothing is masked. DESCRIBED: the operands
of products are tensor descriptors, which read zeros outside a tensor. Called by another kernel, one
does the work of its program number ``program``.

Some matrix units read float32 operands along the inner axis of a product alone. There, what a
gradient of weights will read is stored a second time as its transpose (names in ``_turned``, None
where it is not wanted), and TURNED kernels of the backward pass read transposes: W^T for
dX = dY W, and dY^T and X^T for dW = dY^T X.
"""

from __future__ import annotations

from tinyllama.harness.kernels import begin, fetch, jit, let_next_start, tl, wait_for_last
from tinyllama.ops.silu_mul import sigmoids


@jit
def _place(program, n_rows, n_columns, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """The tile of a program (None: of this one), row and column: GROUP tiles below each other
    follow each other, so that what they read is still in the cache."""
    if program is None:
        program = tl.program_id(0)
    down, across = tl.cdiv(n_rows, BM), tl.cdiv(n_columns, BN)
    first = program // (GROUP * across) * GROUP
    high = tl.minimum(down - first, GROUP)
    inside = program % (GROUP * across)
    return first + inside % high, inside // high


@jit
def _load(
    x, row, column, stride, n_rows, n_columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """x[row : row + ROWS, column : column + COLUMNS] in its own dtype, zeros outside."""
    i, j = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    at = x + (tl.cast(row, tl.int64) * stride + column) + (i * stride + j)
    if EVEN:
        tile = tl.load(at)
    else:
        tile = tl.load(at, mask=(i < n_rows - row) & (j < n_columns - column), other=0.0)
    return tile


@jit
def _store(
    y, tile, row, column, stride, n_rows, n_columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Write y[row : row + ROWS, column : column + COLUMNS], rounded to y's dtype."""
    i, j = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    at = y + (tl.cast(row, tl.int64) * stride + column) + (i * stride + j)
    if EVEN:
        tl.store(at, tile.to(y.dtype.element_ty))
    else:
        inside = (i < n_rows - row) & (j < n_columns - column)
        tl.store(at, tile.to(y.dtype.element_ty), mask=inside)


@jit
def _store_turned(
    y, tile, row, column, n_rows, n_columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Write the tile that `_store` would write into y (N n_columns) into its transpose
    y (n_columns N), whose rows are dense. 32 bits hold COLUMNS N (see `launches.turns`)."""
    i, j = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    at = y + (tl.cast(column, tl.int64) * n_rows + row) + (j * n_rows + i)
    if EVEN:
        tl.store(at, tile.to(y.dtype.element_ty))
    else:
        inside = (i < n_rows - row) & (j < n_columns - column)
        tl.store(at, tile.to(y.dtype.element_ty), mask=inside)


@jit
def _vector(x, start, size, SIZE: tl.constexpr, EVEN: tl.constexpr):
    """x[start : start + SIZE] in float32, zeros past its end."""
    i = tl.arange(0, SIZE)
    if EVEN:
        found = tl.load(x + start + i)
    else:
        found = tl.load(x + start + i, mask=i < size - start, other=0.0)
    return found.to(tl.float32)


@jit
def _row_sums(parts, row, n_rows, n_parts, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """The sums of parts (N n_parts) over its rows from ``row`` on; PARTS >= n_parts."""
    tile = _load(parts, row, 0, n_parts, n_rows, n_parts, ROWS, PARTS, False)
    return tl.sum(tile, 1)


@jit
def _product(
    a, b, row, column, n_rows, n_columns, inner, a_stride, b_stride,
    OUT_BY_IN: tl.constexpr, PAIR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """(BM BN) float32: rows of a (N inner) times columns of b, which is (columns, inner) where
    OUT_BY_IN, else (inner, columns). PAIR: b is two matrices behind each other (2 columns inner),
    and the tile has BN / 2 columns of each. DESCRIBED: a and b are tensor descriptors, whose blocks
    are what a step takes."""
    acc = tl.zeros((BM, BN), tl.float32)
    if DESCRIBED:
        for first in range(0, inner, BK):
            if PAIR:
                b_tile = tl.trans(tl.reshape(b.load([0, column, first]), (BN, BK)))
            elif OUT_BY_IN:
                b_tile = tl.trans(b.load([column, first]))
            else:
                b_tile = b.load([first, column])
            acc = tl.dot(a.load([row, first]), b_tile, acc, input_precision=PRECISION)
    else:
        i, j, k = tl.arange(0, BM)[:, None], tl.arange(0, BN), tl.arange(0, BK)
        if PAIR:
            local = column + j % (BN // 2)
            columns = (local + j // (BN // 2) * n_columns).to(tl.int64)
        else:
            local = column + j
            columns = local.to(tl.int64)
        inside = local < n_columns
        a_at = a + tl.cast(row, tl.int64) * a_stride + (i * a_stride + k[None, :])
        if OUT_BY_IN:
            b_at = b + (columns[None, :] * b_stride + k[:, None])
        else:
            b_at = b + (k[:, None] * tl.cast(b_stride, tl.int64) + columns[None, :])
        for first in range(0, inner, BK):
            if EVEN:
                a_tile, b_tile = tl.load(a_at), tl.load(b_at)
            else:
                left = k < inner - first
                a_tile = tl.load(a_at, mask=(i < n_rows - row) & left[None, :], other=0.0)
                b_tile = tl.load(b_at, mask=left[:, None] & inside[None, :], other=0.0)
            acc = tl.dot(a_tile, b_tile, acc, input_precision=PRECISION)
            a_at += BK
            if OUT_BY_IN:
                b_at += BK
            else:
                b_at += BK * tl.cast(b_stride, tl.int64)
    return acc


@jit
def _fetch(x, row, column, stride, n_rows, n_columns, BM: tl.constexpr, BN: tl.constexpr):
    """Bring a tile into the cache, by one address of each 64 elements of a row."""
    LINES: tl.constexpr = (BN + 63) // 64
    i, j = tl.arange(0, BM)[:, None], tl.arange(0, LINES)[None, :] * 64
    i, j = tl.minimum(i, n_rows - 1 - row), tl.minimum(j, n_columns - 1 - column)
    fetch(x + (tl.cast(row, tl.int64) * stride + column) + (i * stride + j))


@jit
def _halves(tile, ROWS: tl.constexpr, HALF: tl.constexpr):
    """The left and the right half of a tile (ROWS, 2 HALF)."""
    return tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, HALF)), (0, 2, 1)))


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
        for first in range(tl.program_id(0) * n_counters, n_counters, 1024):  # by the first one
            at = first + tl.arange(0, 1024)
            tl.store(counters + at, tl.zeros((1024,), tl.int32), mask=at < n_counters)
    row = tl.program_id(0) * ROWS
    wide = _load(x, row, 0, width, n_rows, width, ROWS, WIDTH, False).to(tl.float32)
    if delta is not None:
        more = _load(delta, row, 0, width, n_rows, width, ROWS, WIDTH, False)
        rounded = (wide + more.to(tl.float32)).to(total.dtype.element_ty)
        _store(total, rounded, row, 0, width, n_rows, width, ROWS, WIDTH, False)
        wide = rounded.to(tl.float32)
    if gain is not None:
        rows, sums = row + tl.arange(0, ROWS), tl.sum(wide * wide, 1)
        if rstd is None:
            tl.store(squares + rows, sums, mask=rows < n_rows)
        else:
            scale = tl.rsqrt(sums / width + eps)
            tl.store(rstd + rows, scale, mask=rows < n_rows)
            wide *= scale[:, None]
        wide *= _vector(gain, 0, width, WIDTH, False)[None, :]
    _store(low, wide, row, 0, width, n_rows, width, ROWS, WIDTH, False)
    if low_turned is not None:
        _store_turned(low_turned, wide, row, 0, n_rows, width, ROWS, WIDTH, False)


@jit
def _scale(
    squares, rstd, row, tile_column, eps, n_rows, width, n_parts,
    ROWS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """1 / rms of the rows; the tiles of the first column keep it for the backward pass."""
    total = _row_sums(squares, row, n_rows, n_parts, ROWS, PARTS)
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
    m, n = _place(program, n_rows, n_columns, BM, BN, GROUP)
    row, column = m * BM, n * BN
    acc = _product(
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
    _store(qkv, acc, row, column, n_columns, n_rows, n_columns, BM, BN, EVEN)
    if qkv_turned is not None:
        _store_turned(qkv_turned, acc, row, column, n_rows, n_columns, BM, BN, EVEN)


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
    m, n = _place(program, n_rows, n_hidden, BM, HALF, GROUP)
    row, column = m * BM, n * HALF
    acc = _product(
        low, w, row, column, n_rows, n_hidden, width, width, width,
        True, True, BM, BN, BK, EVEN, PRECISION, DESCRIBED,
    )  # fmt: skip
    acc *= _scale(squares, rstd, row, n, eps, n_rows, width, n_parts, BM, PARTS)[:, None]
    gate, up = _halves(acc, BM, HALF)
    gate, up = gate.to(gate_up.dtype.element_ty), up.to(gate_up.dtype.element_ty)
    stride = 2 * n_hidden
    _store(gate_up, gate, row, column, stride, n_rows, n_hidden, BM, HALF, EVEN)
    _store(gate_up + n_hidden, up, row, column, stride, n_rows, n_hidden, BM, HALF, EVEN)
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    sigmoid, _ = sigmoids(gate)
    _store(h, gate * sigmoid * up, row, column, n_hidden, n_rows, n_hidden, BM, HALF, EVEN)
    if h_turned is not None:
        hidden = gate * sigmoid * up
        _store_turned(h_turned, hidden, row, column, n_rows, n_hidden, BM, HALF, EVEN)


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
    m, n = _place(program, n_rows, width, BM, BN, GROUP)
    row, column = m * BM, n * BN
    if PDL and FETCH:
        _fetch(x, row, column, width, n_rows, width, BM, BN)
    wait_for_last(PDL)
    acc = _product(
        a, w, row, column, n_rows, width, inner, inner, inner,
        True, False, BM, BN, BK, EVEN, PRECISION, DESCRIBED,
    )  # fmt: skip
    acc += _load(x, row, column, width, n_rows, width, BM, BN, EVEN).to(tl.float32)
    rounded = acc.to(total.dtype.element_ty)
    _store(total, rounded, row, column, width, n_rows, width, BM, BN, EVEN)
    if gain is not None:
        wide = rounded.to(tl.float32)  # the norm is that of the sum as it is stored
        gains = _vector(gain, column, width, BN, EVEN)
        _store(low, wide * gains[None, :], row, column, width, n_rows, width, BM, BN, EVEN)
        if low_turned is not None:
            low_tile = wide * gains[None, :]
            _store_turned(low_turned, low_tile, row, column, n_rows, width, BM, BN, EVEN)
        rows = row + tl.arange(0, BM)
        places = squares + rows.to(tl.int64) * n_parts + n
        tl.store(places, tl.sum(wide * wide, 1), mask=rows < n_rows)


# -- backward -------------------------------------------------------------------------------------


@jit
def _activation_gradient(
    dh, gate_up, dgate_up, row, column, n_rows, n_hidden,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Store dgate and dup (BM BN) for dh; -> the row sums of their products with gate and up."""
    stride = 2 * n_hidden
    gate = _load(gate_up, row, column, stride, n_rows, n_hidden, BM, BN, EVEN).to(tl.float32)
    up = _load(gate_up + n_hidden, row, column, stride, n_rows, n_hidden, BM, BN, EVEN)
    sigmoid, rest = sigmoids(gate)
    dup = dh * gate * sigmoid
    _store(dgate_up + n_hidden, dup, row, column, stride, n_rows, n_hidden, BM, BN, EVEN)
    up = up.to(tl.float32)
    dgate = dh * up * sigmoid * (1 + gate * rest)
    _store(dgate_up, dgate, row, column, stride, n_rows, n_hidden, BM, BN, EVEN)
    return tl.sum(dgate * gate + dup * up, 1)


@jit
def _activation_gradient_turned(
    dh, gate_up, dgate_up, turned, row, column, n_rows, n_hidden,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """`_activation_gradient`, which also stores the transposes in ``turned`` (2F N)."""
    stride = 2 * n_hidden
    gate = _load(gate_up, row, column, stride, n_rows, n_hidden, BM, BN, EVEN).to(tl.float32)
    up = _load(gate_up + n_hidden, row, column, stride, n_rows, n_hidden, BM, BN, EVEN)
    sigmoid, rest = sigmoids(gate)
    dup = dh * gate * sigmoid
    below = turned + tl.cast(n_hidden, tl.int64) * n_rows
    _store(dgate_up + n_hidden, dup, row, column, stride, n_rows, n_hidden, BM, BN, EVEN)
    _store_turned(below, dup, row, column, n_rows, n_hidden, BM, BN, EVEN)
    up = up.to(tl.float32)
    dgate = dh * up * sigmoid * (1 + gate * rest)
    _store(dgate_up, dgate, row, column, stride, n_rows, n_hidden, BM, BN, EVEN)
    _store_turned(turned, dgate, row, column, n_rows, n_hidden, BM, BN, EVEN)
    return tl.sum(dgate * gate + dup * up, 1)


@jit
def _turned_by_slices(
    dh, gate_up, dgate_up, turned, row, column, n_rows, n_hidden,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """`_activation_gradient_turned`, half of the columns after the other where they are many."""
    if BM * BN >= 4096:
        left, right = _halves(dh, BM, BN // 2)
        total = _activation_gradient_turned(
            left, gate_up, dgate_up, turned, row, column, n_rows, n_hidden, BM, BN // 2, EVEN
        )
        total += _activation_gradient_turned(
            right, gate_up, dgate_up, turned, row, column + BN // 2, n_rows, n_hidden,
            BM, BN // 2, EVEN,
        )  # fmt: skip
    else:
        total = _activation_gradient_turned(
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
    m, n = _place(program, n_rows, n_hidden, BM, BN, GROUP)
    row, column = m * BM, n * BN
    if PDL and FETCH:
        stride = 2 * n_hidden
        _fetch(gate_up, row, column, stride, n_rows, n_hidden, BM, BN)
        _fetch(gate_up + n_hidden, row, column, stride, n_rows, n_hidden, BM, BN)
    wait_for_last(PDL)
    acc = _product(
        dy, w, row, column, n_rows, n_hidden, width, width, width if TURNED else n_hidden,
        TURNED, False, BM, BN, BK, EVEN, PRECISION, DESCRIBED,
    )  # fmt: skip
    acc *= _vector(rstd, row, n_rows, BM, EVEN)[:, None]
    HALF: tl.constexpr = BN // 2  # at a time, so that registers suffice
    left, right = _halves(acc, BM, HALF)
    if dgate_up_turned is None:
        total = _activation_gradient(
            left, gate_up, dgate_up, row, column, n_rows, n_hidden, BM, HALF, EVEN
        )
        total += _activation_gradient(
            right, gate_up, dgate_up, row, column + HALF, n_rows, n_hidden, BM, HALF, EVEN
        )
    else:
        total = _turned_by_slices(
            left, gate_up, dgate_up, dgate_up_turned, row, column, n_rows, n_hidden,
            BM, HALF, EVEN,
        )  # fmt: skip
        total += _turned_by_slices(
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
    m, n = _place(program, n_rows, width, BM, BN, GROUP)
    row, column = m * BM, n * BN
    if PDL and FETCH:
        _fetch(x, row, column, width, n_rows, width, BM, BN)
    wait_for_last(PDL)
    acc = _product(
        dy, w, row, column, n_rows, width, inner, inner, inner if TURNED else width,
        TURNED, False, BM, BN, BK, EVEN, PRECISION, DESCRIBED,
    )  # fmt: skip
    if not SCALED:
        acc *= _vector(rstd, row, n_rows, BM, EVEN)[:, None]
    wide = _load(x, row, column, width, n_rows, width, BM, BN, EVEN).to(tl.float32)
    share = tl.sum(acc * wide, 0)
    at = column + tl.arange(0, BN)
    tl.store(dgain + m * width + at, share, mask=at < width)
    total = _row_sums(parts, row, n_rows, n_parts, BM, PARTS)
    factor = _vector(rstd, row, n_rows, BM, EVEN) * total / width
    if not SCALED:
        factor *= _vector(rstd, row, n_rows, BM, EVEN)
    acc = acc * _vector(gain, column, width, BN, EVEN)[None, :] - wide * factor[:, None]
    acc += _load(dresidual, row, column, width, n_rows, width, BM, BN, EVEN).to(tl.float32)
    _store(dx, acc, row, column, width, n_rows, width, BM, BN, EVEN)
    if dx_low is not None:
        _store(dx_low, acc, row, column, width, n_rows, width, BM, BN, EVEN)
    if dx_turned is not None:
        _store_turned(dx_turned, acc, row, column, n_rows, width, BM, BN, EVEN)


@jit
def product_kernel(
    dy, w, dx, n_rows, width, inner,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, DESCRIBED: tl.constexpr,
    PDL: tl.constexpr = False, program=None, TURNED: tl.constexpr = False, dx_turned=None,
):  # fmt: skip
    """dx (N D) = dy W with W (inner D; (D inner) where TURNED)."""
    begin(PDL)
    m, n = _place(program, n_rows, width, BM, BN, GROUP)
    row, column = m * BM, n * BN
    acc = _product(
        dy, w, row, column, n_rows, width, inner, inner, inner if TURNED else width,
        TURNED, False, BM, BN, BK, EVEN, PRECISION, DESCRIBED,
    )  # fmt: skip
    _store(dx, acc, row, column, width, n_rows, width, BM, BN, EVEN)
    if dx_turned is not None:
        _store_turned(dx_turned, acc, row, column, n_rows, width, BM, BN, EVEN)


@jit
def _first(one, two, three, a, b, c, d):
    """Of a, b, c and d the one of the first condition that holds; d if none does. Not by branches:
    AMD's compiler in triton 3.6 ends on pointers that branches choose."""
    return tl.where(one, a, tl.where(two, b, tl.where(three, c, d)))


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
        acc = _product(
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
            acc = tl.dot(tl.trans(left_tile), right_tile, acc, input_precision=PRECISION)
            left_at += BK * tl.cast(n_out, tl.int64)
            right_at += BK * tl.cast(n_in, tl.int64)
    _store(dw, acc, row, column, n_in, n_out, n_in, BM, BN, EVEN)
