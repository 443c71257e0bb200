"""Twice a matrix, by a kernel that takes contiguous tensors alone and asserts it, in Triton.

After the RMSNorm of conch-triton-kernels 1.3, which compares strides in the same way.
"""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor


@triton.jit
def double_kernel(x, y, D, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    value = tl.load(x + row * D + column, mask=column < D, other=0.0)
    tl.store(y + row * D + column, value * 2, mask=column < D)


op = Op(
    "corpus_dense_doubling",
    inputs={"x": Tensor("N D")},
    outputs={"y": "N D"},
    cases=[Case(N=4, D=32), Case(N=3, D=20, why="part of a block")],
)


@op.reference
def eager(x):
    return x * 2


@op.provider("triton", requires=("triton",), contiguous=True)
def candidate(x):
    y = torch.empty_like(x)
    assert x.is_contiguous(), "x must be contiguous"
    assert x.stride(-2) == x.shape[-1], "the rows of x must follow each other without gaps"
    if x.numel():
        double_kernel[(len(x),)](x, y, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return y


# variants
from correctness_tests.corpus.variants import right

VARIANTS = [right()]
