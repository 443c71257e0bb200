"""The copy of a tensor into dense memory, fast for any order of its axes.

A copy in the order of the result reads a transposed tensor by single elements, and so moves a
whole sector of memory for each. This kernel takes tiles of two axes: the last one, along which it
writes, and those that lie closest together in x, along which it reads.
"""

import itertools

import torch

from tinyllama.harness.kernels.launch import HAS_TRITON, cdiv, jit, next_power_of_2, tl

DIGITS = 3  # axes of x beside the last, after those that lie side by side are joined
TILE = 4096  # elements of a tile; in a transposed one 64 to a side, 32 of those of four bytes


@jit
def dense_kernel(  # type: ignore[no-untyped-def]
    x, y, n_rows, n_columns, step, inner, middle, x_inner, x_middle, x_outer,
    y_inner, y_middle, y_outer,
    JOINED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """y[row, column] = x[row, column] on a tile. A row's number has three digits, of which the
    first two run to ``inner`` and ``middle``; each has a stride in x and in y. Columns are ``step``
    apart in x and dense in y. JOINED: in x a row lies ``x_inner`` after the one before."""
    across = tl.cdiv(n_columns, COLUMNS)
    rows = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(0) % across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < n_rows)[:, None] & (columns < n_columns)[None, :]
    first, rest = rows % inner, rows // inner
    second, third = rest % middle, rest // middle
    offset = first * x_inner + second * x_middle + third * x_outer
    source = rows * x_inner if JOINED else offset
    tile = tl.load(x + source[:, None] + (columns * step)[None, :], mask=inside)
    target = first * y_inner + second * y_middle + third * y_outer
    tl.store(y + target[:, None] + columns[None, :], tile, mask=inside)


def dense_copy(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of x, of any shape, strides and dtype, outside autograd. One launch; by
    torch's own copy where triton is not installed, and where x has more than ``DIGITS`` axes that
    cannot be joined beside its last."""
    y = x.new_empty(x.shape)
    *rows, columns = _axes(x, y) or [(1, 0, 0)]
    if not HAS_TRITON or len(rows) > DIGITS or not x.numel():
        return y.copy_(x.detach())
    n_columns, step, _ = columns
    rows.sort(key=lambda axis: axis[1])  # the axis along which x is densest is the first digit
    n_rows = y.numel() // n_columns
    joined = all(b[1] == a[0] * a[1] for a, b in itertools.pairwise(rows))
    transposed = bool(rows) and joined and rows[0][1] < step
    (inner, *inners), (middle, *middles), (_, *outers) = (*rows, *[(1, 0, 0)] * DIGITS)[:DIGITS]
    if transposed:
        width = height = 32 if x.element_size() >= 4 else 64
    else:
        width = min(next_power_of_2(n_columns), TILE // 4)
        height = min(next_power_of_2(n_rows), TILE // width)
    dense_kernel[(cdiv(n_rows, height) * cdiv(n_columns, width),)](
        x, y, n_rows, n_columns, step, inner, middle, inners[0], middles[0], outers[0],
        inners[1], middles[1], outers[1],
        JOINED=joined, ROWS=height, COLUMNS=width, num_warps=4,
    )  # fmt: skip
    return y


def _axes(x: torch.Tensor, y: torch.Tensor) -> list[tuple[int, int, int]]:
    """Size, stride in x and stride in y (which is dense) of each axis; axes that lie side by side
    in x are one, and those of size 1 are none."""
    axes: list[tuple[int, int, int]] = []
    for axis in zip(reversed(x.shape), reversed(x.stride()), reversed(y.stride()), strict=True):
        size, stride, _ = axis
        if size != 1 and axes and stride == axes[-1][0] * axes[-1][1]:
            axes[-1] = (axes[-1][0] * size, *axes[-1][1:])
        elif size != 1:
            axes.append(axis)
    return axes[::-1]
