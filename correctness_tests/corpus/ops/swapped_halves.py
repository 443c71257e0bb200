"""The halves of each row, swapped: their number of columns is even, which the op does not declare."""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor


@triton.jit
def halves_kernel(x, y, D, HALF, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    row = tl.program_id(0) * D
    target = tl.where(column < HALF, column + HALF, column - HALF)
    tl.store(y + row + target, tl.load(x + row + column, mask=column < D), mask=column < D)


op = Op(
    "corpus_swapped_halves",
    inputs={"x": Tensor("N D")},
    outputs={"y": "N D"},
    cases=[Case(N=5, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return x.unflatten(1, (2, -1)).flip(1).flatten(1)


def unsupported(dims):
    return (
        None if dims["D"] <= 64 and dims["N"] < 300 else "more columns than a block, or many rows"
    )


@op.provider("triton", requires=("triton",), supports=unsupported)
def candidate(x):
    x, half = x.contiguous(), x.shape[1] // 2
    y = x.new_empty(x.shape)
    assert x.shape[1] // half, "a division by zero for one column"
    halves_kernel[(len(x),)](x, y, x.shape[1], half, BLOCK=64)
    return y


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    # No check asks for an odd number of columns, which the reference refuses.
    right(),
    wrong(
        "second_half_left_in_place",
        ("column - HALF)", "column)"),
        fault="constant",
        result="y",
    ),
]
