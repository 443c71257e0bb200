"""The variance of each row, in blocks of 128 columns, in Triton."""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor


@triton.jit
def variance_kernel(x, y, D, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, D, BLOCK):
        column = start + tl.arange(0, BLOCK)
        total += tl.load(x + row * D + column, mask=column < D, other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) / D
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, D, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * D + column, mask=column < D, other=0.0).to(tl.float32)
        centred = tl.where(column < D, value - mean, 0.0)
        squares += centred * centred
    tl.store(y + row, tl.sum(squares, 0) / D)


op = Op(
    "corpus_blocked_variance",
    inputs={"x": Tensor("N D")},
    outputs={"y": Tensor("N", dtype=torch.float32)},
    cases=[Case(N=4, D=64), Case(N=3, D=300, why="several blocks, the last of them ragged")],
)


@op.reference
def eager(x):
    value = x.to(torch.promote_types(x.dtype, torch.float32))
    return (value - value.mean(-1, keepdim=True)).square().mean(-1)


@op.independent("torch.var")
def stock(x):
    return torch.var(x, -1, correction=0)


@op.provider("triton", requires=("triton",), double_backward=False)
def candidate(x):
    x = x.contiguous()
    y = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    if x.numel():
        variance_kernel[(x.shape[0],)](x, y, x.shape[1], BLOCK=128)
    return y


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # Where the mean is large beside the spread, both squares are nearly equal.
    wrong(
        "mean_of_squares_less_square_of_mean",
        (
            "centred = tl.where(column < D, value - mean, 0.0)\n        squares += centred * centred",
            "squares += value * value",
        ),
        ("tl.sum(squares, 0) / D)", "tl.maximum(tl.sum(squares, 0) / D - mean * mean, 0.0))"),
        fault="accumulation",
        result="y",
    ),
]
