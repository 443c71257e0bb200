"""The sum of a matrix in Triton, one program a row. The provider does not say that it has kernels."""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor


@triton.jit
def sum_kernel(x, y, D, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    total = tl.sum(tl.load(x + row * D + column, mask=column < D, other=0.0), 0)
    tl.store(y + row, total)


op = Op(
    "corpus_matrix_sum",
    inputs={"x": Tensor("N D")},
    outputs={"y": ""},
    cases=[Case(N=5, D=16), Case(N=3, D=7, why="odd sizes")],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return x.sum()


@op.provider("rows")
def candidate(x):
    x = x.contiguous()
    y = x.new_zeros(len(x))
    if x.numel():
        sum_kernel[(len(x),)](x, y, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return y.sum()


# variants
from correctness_tests.corpus.variants import right, wrong

STORE = "    tl.store(y + row, total)\n"
ONE_SUM = "y = x.new_zeros(len(x))", "y = x.new_zeros(1)"

VARIANTS = [
    right(),
    right(
        "no_kernel",
        ("    return y.sum()\n", "    return x.sum()\n"),
        ("    if x.numel():\n", "    if False:\n"),
    ),
    # All programs add to one address without an atomic.
    wrong(
        "sum_without_an_atomic",
        ONE_SUM,
        (STORE, "    tl.store(y, tl.load(y) + total)\n"),
        fault="race",
        rank="unsafe",
    ),
]
