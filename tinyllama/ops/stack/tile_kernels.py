"""Tiles of matrices: what the kernels of `stack` are made of.

Shape suffixes as in `tinyllama.ops`. A tile is (BM BN), a step of a product takes BK of the inner
axis. EVEN: the tiles divide the sizes, and nothing is masked. DESCRIBED: the operands of products
are tensor descriptors, which read zeros outside a tensor. In tf32 operands are rounded as they are
read: by descriptors, or in registers (`tinyllama.harness.kernels.tf32`).
"""

from __future__ import annotations

from tinyllama.harness.kernels import fetch, jit, tl
from tinyllama.harness.kernels.tf32 import to_tf32


@jit
def place(program, n_rows, n_columns, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
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
def load_tile(
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
def store_tile(
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
def store_turned(
    y, tile, row, column, n_rows, n_columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Write the tile that `store` would write into y (N n_columns) into its transpose
    y (n_columns N), whose rows are dense. 32 bits hold COLUMNS N (see `configs.turns`)."""
    i, j = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    at = y + (tl.cast(column, tl.int64) * n_rows + row) + (j * n_rows + i)
    if EVEN:
        tl.store(at, tile.to(y.dtype.element_ty))
    else:
        inside = (i < n_rows - row) & (j < n_columns - column)
        tl.store(at, tile.to(y.dtype.element_ty), mask=inside)


@jit
def load_vector(x, start, size, SIZE: tl.constexpr, EVEN: tl.constexpr):
    """x[start : start + SIZE] in float32, zeros past its end."""
    i = tl.arange(0, SIZE)
    if EVEN:
        values = tl.load(x + start + i)
    else:
        values = tl.load(x + start + i, mask=i < size - start, other=0.0)
    return values.to(tl.float32)


@jit
def row_sums(parts, row, n_rows, n_parts, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """The sums of parts (N n_parts) over its rows from ``row`` on; PARTS >= n_parts."""
    tile = load_tile(parts, row, 0, n_parts, n_rows, n_parts, ROWS, PARTS, False)
    return tl.sum(tile, 1)


@jit
def tile_product(
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
            if PRECISION == "tf32":
                a_tile, b_tile = to_tf32(a_tile), to_tf32(b_tile)
            acc = tl.dot(a_tile, b_tile, acc, input_precision=PRECISION)
            a_at += BK
            if OUT_BY_IN:
                b_at += BK
            else:
                b_at += BK * tl.cast(b_stride, tl.int64)
    return acc


@jit
def prefetch(x, row, column, stride, n_rows, n_columns, BM: tl.constexpr, BN: tl.constexpr):
    """Bring a tile into the cache, by one address of each 64 elements of a row."""
    LINES: tl.constexpr = (BN + 63) // 64
    i, j = tl.arange(0, BM)[:, None], tl.arange(0, LINES)[None, :] * 64
    i, j = tl.minimum(i, n_rows - 1 - row), tl.minimum(j, n_columns - 1 - column)
    fetch(x + (tl.cast(row, tl.int64) * stride + column) + (i * stride + j))


@jit
def halves(tile, ROWS: tl.constexpr, HALF: tl.constexpr):
    """The left and the right half of a tile (ROWS, 2 HALF)."""
    return tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, HALF)), (0, 2, 1)))
