"""Cumulative sums of rows, in blocks of 128 columns with a carry in float32; the backward pass runs
from the end of a row. In Triton."""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor


@triton.jit
def sum_kernel(x, y, D, REVERSE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    carry = tl.zeros([1], dtype=tl.float32)
    for start in range(0, D, BLOCK):
        place = start + tl.arange(0, BLOCK)
        at = (D - 1 - place) if REVERSE else place
        v = tl.load(x + row * D + at, mask=place < D, other=0.0).to(tl.float32)
        tl.store(y + row * D + at, tl.cumsum(v, 0) + carry, mask=place < D)
        carry += tl.sum(v, 0)


def sums(x, reverse):
    x = x.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        sum_kernel[(x.shape[0],)](x, y, x.shape[1], REVERSE=reverse, BLOCK=128)
    return y


class Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return sums(x, False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        return sums(dy, True)


op = Op(
    "corpus_carried_cumsum",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N D"},
    cases=[Case(N=3, D=64), Case(N=2, D=300, why="three blocks, the last of them ragged")],
)


@op.reference
def eager(x):
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.cumsum(x, -1, dtype=wide).to(x.dtype)


@op.independent("a product with a triangle of ones")
def written_out(x):
    return x @ torch.ones(x.shape[1], x.shape[1], dtype=x.dtype, device=x.device).triu()


@op.provider("triton", requires=("triton",), double_backward=False)
def candidate(x):
    return Sums.apply(x)


# variants
from correctness_tests.corpus.variants import right

VARIANTS = [right()]
