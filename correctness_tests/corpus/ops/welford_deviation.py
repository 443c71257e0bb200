"""The sums of the squares of x less its mean, of each row, each column and all, by Welford's
update: parts are combined by their mean, sum and count."""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor


@triton.jit
def combined(mean, square, count, other_mean, other_square, other_count):
    distance = other_mean - mean
    total = count + other_count
    share = other_count / tl.maximum(total, 1.0)
    return (
        mean + distance * share,
        square + other_square + distance * distance * count * share,
        total,
    )


@triton.jit
def deviation_kernel(x, rows, columns, overall, N, D, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    mask = (row[:, None] < N) & (column[None, :] < D)
    value = tl.load(x + row[:, None] * D + column[None, :], mask=mask, other=0.0)
    count = tl.where(mask, 1.0, 0.0)
    _, along_rows, _ = tl.reduce((value, 0.0 * value, count), 1, combined)
    tl.store(rows + row, along_rows, mask=row < N)
    _, along_columns, _ = tl.reduce((value, 0.0 * value, count), 0, combined, keep_dims=True)
    tl.store(columns + column[None, :], along_columns, mask=column[None, :] < D)
    _, of_matrix, _ = tl.reduce((value, 0.0 * value, count), None, combined)
    tl.store(overall, of_matrix)


op = Op(
    "corpus_welford_deviation",
    inputs={"x": Tensor("N D")},
    outputs={"rows": "N", "columns": "D", "overall": ""},
    cases=[Case(N=4, D=8), Case(N=3, D=11, why="sizes that are no powers of two")],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    rows = (x - x.mean(1, keepdim=True)).square().sum(1)
    columns = (x - x.mean(0, keepdim=True)).square().sum(0)
    return rows, columns, (x - x.mean()).square().sum()


def small(dims):
    return None if max(dims.values()) <= 96 else "use up to 96 rows and columns"


@op.provider("triton", requires=("triton",), supports=small)
def candidate(x):
    x = x.contiguous()
    N, D = x.shape
    rows, columns, overall = x.new_zeros(N), x.new_zeros(D), x.new_zeros(())
    if x.numel():
        ROWS, COLUMNS = triton.next_power_of_2(N), triton.next_power_of_2(D)
        deviation_kernel[(1,)](x, rows, columns, overall, N, D, ROWS=ROWS, COLUMNS=COLUMNS)
    return rows, columns, overall


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # The other part is taken for one element.
    wrong(
        "count_grows_by_one",
        ("total = count + other_count", "total = count + 1.0"),
        fault="accumulation",
        result="rows",
    ),
    wrong(
        "squares_between_parts_forgotten",
        ("square + other_square + distance * distance * count * share", "square + other_square"),
        fault="accumulation",
        result="rows",
    ),
]
