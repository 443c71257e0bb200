"""Softmax of rows in blocks of 128 columns, with a running maximum, and its gradient, in Triton."""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor


@triton.jit
def forward_kernel(x, y, largest_of, total_of, D, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest = -float("inf")
    total = 0.0
    for start in range(0, D, BLOCK):
        column = start + tl.arange(0, BLOCK)
        v = tl.load(x + row * D + column, mask=column < D, other=-float("inf")).to(tl.float32)
        new = tl.maximum(largest, tl.max(v, 0), propagate_nan=tl.PropagateNan.ALL)
        safe = tl.where(new == -float("inf"), 0.0, new)
        total = total * tl.exp(largest - safe) + tl.sum(tl.exp(v - safe), 0)
        largest = new
    for start in range(0, D, BLOCK):
        column = start + tl.arange(0, BLOCK)
        v = tl.load(x + row * D + column, mask=column < D, other=-float("inf")).to(tl.float32)
        tl.store(y + row * D + column, tl.exp(v - largest) / total, mask=column < D)
    tl.store(largest_of + row, largest)
    tl.store(total_of + row, total)


@triton.jit
def backward_kernel(x, largest_of, total_of, dy, dx, D, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest, total = tl.load(largest_of + row), tl.load(total_of + row)
    parts = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, D, BLOCK):
        column = start + tl.arange(0, BLOCK)
        v = tl.load(x + row * D + column, mask=column < D, other=-float("inf")).to(tl.float32)
        upstream = tl.load(dy + row * D + column, mask=column < D, other=0.0).to(tl.float32)
        parts += upstream * (tl.exp(v - largest) / total)
    inner = tl.sum(parts, 0)
    for start in range(0, D, BLOCK):
        column = start + tl.arange(0, BLOCK)
        v = tl.load(x + row * D + column, mask=column < D, other=-float("inf")).to(tl.float32)
        upstream = tl.load(dy + row * D + column, mask=column < D, other=0.0).to(tl.float32)
        slope = tl.exp(v - largest) / total * (upstream - inner)
        tl.store(dx + row * D + column, slope, mask=column < D)


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        N, D = x.shape
        y = torch.empty(N, D, dtype=x.dtype, device=x.device)
        largest, total = (torch.empty(N, dtype=torch.float32, device=x.device) for _ in range(2))
        if x.numel():
            forward_kernel[(N,)](x, y, largest, total, D, BLOCK=128)
        ctx.save_for_backward(x, largest, total)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, largest, total = ctx.saved_tensors
        N, D = x.shape
        dx = torch.empty(N, D, dtype=x.dtype, device=x.device)
        if x.numel():
            backward_kernel[(N,)](x, largest, total, dy.contiguous(), dx, D, BLOCK=128)
        return dx


op = Op(
    "corpus_online_softmax",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N D"},
    cases=[Case(N=4, D=64), Case(N=3, D=300, why="three blocks, the last of them ragged")],
)


@op.reference
def eager(x):
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.softmax(x, -1, dtype=wide).to(x.dtype)


@op.independent("exponentials over their sum")
def written_out(x):
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


@op.magnitude
def terms(x, upstream):
    """Where a probability is nearly 1, the upstream gradient and the sum less it cancel."""
    p, dy = torch.softmax(x, -1), upstream["y"]
    return {"grad x": p * (dy.square() + (p * dy).square().sum(-1, keepdim=True)).sqrt()}


@op.provider("triton", requires=("triton",), double_backward=False)
def candidate(x):
    return Softmax.apply(x)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # The sum so far is not scaled to the new maximum.
    wrong(
        "sum_of_earlier_blocks_not_scaled",
        ("total = total * tl.exp(largest - safe) +", "total = total +"),
        fault="accumulation",
        result="y",
    ),
]
