"""Running sums of a matrix: along rows, along rows from their end, and along columns."""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.declare.values import normal


@triton.jit
def scan_kernel(x, along, back, down, N, D, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    mask = (row < N) & (column < D)
    value = tl.load(x + row * D + column, mask=mask, other=0.0)
    tl.store(along + row * D + column, tl.cumsum(value, 1), mask=mask)
    tl.store(back + row * D + column, tl.cumsum(value, 1, reverse=True), mask=mask)
    tl.store(down + row * D + column, tl.cumsum(value, 0), mask=mask)


op = Op(
    "corpus_cumulative_sums",
    inputs={"x": Tensor("N D", values=normal(std=1e-3, mean=1.0))},
    outputs={"along": "N D", "back": "N D", "down": "N D"},
    cases=[Case(N=2, D=8192, why="sums of many elements"), Case(N=3, D=11)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return x.cumsum(1), x.flip(1).cumsum(1).flip(1), x.cumsum(0)


def in_one_program(dims):
    return None if dims["N"] <= 16 and dims["D"] <= 8192 else "use 16 rows, 8,192 columns"


@op.provider("triton", requires=("triton",), supports=in_one_program)
def candidate(x):
    x = x.contiguous()
    along, back, down = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
    N, D = x.shape
    if x.numel():
        ROWS, COLUMNS = triton.next_power_of_2(N), triton.next_power_of_2(D)
        scan_kernel[(1,)](x, along, back, down, N, D, ROWS=ROWS, COLUMNS=COLUMNS)
    return along, back, down


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # A scan adds in a tree, so sums of ones in float16 do not stay at 2,048.
    right(
        "of_ones_in_float16",
        ("dtypes=(torch.float32,)", "dtypes=(torch.float16,)"),
        ("values=normal(std=1e-3, mean=1.0)", "values=normal(std=0.0, mean=1.0)"),
        ("D=8192, why", "D=4096, why"),
    ),
    wrong(
        "summed_in_float16",
        ("mask=mask, other=0.0)\n", "mask=mask, other=0.0).to(tl.float16)\n"),
        fault="accumulation",
        result="along",
    ),
    wrong(
        "sums_from_the_end_begin_at_the_start",
        ("tl.cumsum(value, 1, reverse=True)", "tl.cumsum(value, 1)"),
        fault="order",
        result="back",
    ),
]
