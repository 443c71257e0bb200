"""A copy of a matrix, one program a row."""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor


@triton.jit
def copy_kernel(x, z, stride, D: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, D)
    tl.store(z + row * D + column, tl.load(x + row * stride + column))


op = Op(
    "corpus_row_copy",
    inputs={"x": Tensor("N D")},
    outputs={"z": "N D"},
    cases=[Case(N=5, D=64)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return x.clone()


def unsupported(dims):
    return None if dims["D"] == 64 and dims["N"] < 300 else "other columns than 64, or many rows"


@op.provider("triton", requires=("triton",), supports=unsupported)
def candidate(x):
    if x.stride(1) != 1:
        x = x.contiguous()
    z = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    copy_kernel[(len(x),)](x, z, x.stride(0), D=x.shape[1])
    return z


# variants
from correctness_tests.corpus.variants import right, wrong

TILE_KERNEL = """@triton.jit
def tile_kernel(x, z, N, D, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    mask = (rows < N) & (columns < D)
    tl.store(z + rows * D + columns, tl.load(x + rows * D + columns, mask=mask), mask=mask)


op = Op("""

VARIANTS = [
    right(),
    # z is dense, and written as if it had the strides of x: far beyond its end.
    wrong(
        "output_with_strides_of_input",
        ("z + row * D + column", "z + row * stride + column"),
        fault="layout",
        result="z",
    ),
    # The tile has more elements than Triton allows, on each chip, for more than 64 columns.
    wrong(
        "tile_of_all_rows",
        ("op = Op(", TILE_KERNEL),
        ("if x.stride(1) != 1:\n        x = x.contiguous()", "x = x.contiguous()"),
        (
            "copy_kernel[(len(x),)](x, z, x.stride(0), D=x.shape[1])",
            "BLOCK = max(64, triton.next_power_of_2(x.shape[1]))\n"
            "    tile_kernel[(1,)](x, z, len(x), x.shape[1], ROWS=8192, BLOCK=BLOCK)",
        ),
        (
            'dims["D"] == 64 and dims["N"] < 300 else "other columns than 64, or many rows"',
            'dims["N"] == 5 else "other rows than 5"',
        ),
        fault="tail",
        rank="refused",
        result="exceeds triton maximum",
    ),
]
