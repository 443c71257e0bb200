"""A copy of a matrix, one program for each block of 16 columns of each row."""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor


@triton.jit
def copy_kernel(x, y, D, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * D + column, mask=column < D, other=0.0)
    tl.store(y + row * D + column, value, mask=column < D)


op = Op(
    "corpus_copied_by_rows",
    inputs={"x": Tensor("N D")},
    outputs={"y": "N D"},
    cases=[Case(N=5, D=16)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return x.clone()


def of_one_block(dims):
    return None if dims["D"] == 16 else "use 16 columns"


@op.provider("triton", requires=("triton",), supports=of_one_block)
def candidate(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    N, D = x.shape
    if N:
        copy_kernel[(N, triton.cdiv(D, 16))](x, y, D, BLOCK=16)
    return y


# variants
from correctness_tests.corpus.variants import right, wrong

NUMBERS = "row = tl.program_id(0).to(tl.int64)\n    column = tl.program_id(1) * BLOCK"
GRID = "(N, triton.cdiv(D, 16))"
SECOND = (NUMBERS, "row = tl.program_id(1).to(tl.int64)\n    column = tl.program_id(0) * BLOCK")
THIRD = (NUMBERS, "row = tl.program_id(2).to(tl.int64)\n    column = tl.program_id(0) * BLOCK")
VARIANTS = [
    right(),
    # A GPU takes no more than 65,535 programs along the second axis of a grid.
    right(
        "rows_along_second_axis",
        SECOND,
        (GRID, "(triton.cdiv(D, 16), N)"),
        slow="65,539 rows",
    ),
    right(
        "rows_along_third_axis",
        THIRD,
        (GRID, "(triton.cdiv(D, 16), 1, N)"),
        slow="65,539 rows",
    ),
    # The rows beyond 65,535 are left out, as by an author who knows what a GPU takes.
    wrong(
        "rows_beyond_65535_left_out",
        (GRID, "(min(N, 65535), triton.cdiv(D, 16))"),
        fault="offset",
        slow="65,539 rows",
        open="an axis of 65,539 programs is more than check interprets",
    ),
    wrong(
        "rows_beyond_65535_left_out_along_second_axis",
        SECOND,
        (GRID, "(triton.cdiv(D, 16), min(N, 65535))"),
        fault="offset",
        slow="65,539 rows",
        open="an axis of 65,539 programs is more than check interprets",
    ),
    wrong(
        "rows_beyond_65535_left_out_along_third_axis",
        THIRD,
        (GRID, "(triton.cdiv(D, 16), 1, min(N, 65535))"),
        fault="offset",
        slow="65,539 rows",
        open="an axis of 65,539 programs is more than check interprets",
    ),
    # Beyond 2^31 elements the offset of a row does not fit 32 bits.
    wrong(
        "row_of_32_bits",
        ("row = tl.program_id(0).to(tl.int64)", "row = tl.program_id(0)"),
        fault="offset",
        rank="warning",
        result="copy_kernel",
    ),
    # The same of the number of a block, in a copy that takes no notice of rows.
    wrong(
        "block_of_elements_of_32_bits",
        (NUMBERS, "row = 0\n    column = tl.program_id(0) * BLOCK"),
        (GRID, "(triton.cdiv(N * D, 16),)"),
        ("(x, y, D, BLOCK=16)", "(x, y, N * D, BLOCK=16)"),
        fault="offset",
        rank="warning",
        result="copy_kernel",
    ),
]
