"""The sum of two matrices, each row of each of them scaled, divided by its root mean square, in
Triton.

After state-spaces/mamba pull request 1023.
"""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.values import normal


@triton.jit
def forward_kernel(x, x1, scale, scale1, y, rstd, D, eps, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < D
    total = tl.load(x + row * D + column, mask=inside, other=0.0) * tl.load(scale + row)
    total += tl.load(x1 + row * D + column, mask=inside, other=0.0) * tl.load(scale1 + row)
    factor = tl.rsqrt(tl.sum(total * total, 0) / D + eps)
    tl.store(rstd + row, factor)
    tl.store(y + row * D + column, total * factor, mask=inside)


@triton.jit
def backward_kernel(dy, y, scale, scale1, rstd, dx, dx1, D, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < D
    upstream = tl.load(dy + row * D + column, mask=inside, other=0.0)
    normed = tl.load(y + row * D + column, mask=inside, other=0.0)
    total = tl.load(rstd + row) * (upstream - normed * tl.sum(upstream * normed, 0) / D)
    tl.store(dx + row * D + column, total * tl.load(scale + row), mask=inside)
    tl.store(dx1 + row * D + column, total * tl.load(scale1 + row), mask=inside)


class Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, x1, scale, scale1, eps):
        x, x1, scale, scale1 = (tensor.contiguous() for tensor in (x, x1, scale, scale1))
        N, D = x.shape
        y, rstd = torch.empty_like(x), torch.empty(N, dtype=torch.float32, device=x.device)
        if N:
            BLOCK = triton.next_power_of_2(D)
            forward_kernel[(N,)](x, x1, scale, scale1, y, rstd, D, eps, BLOCK=BLOCK)
        ctx.save_for_backward(y, scale, scale1, rstd)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        y, scale, scale1, rstd = ctx.saved_tensors
        N, D = y.shape
        dx, dx1 = torch.empty_like(y), torch.empty_like(y)
        if N:
            BLOCK = triton.next_power_of_2(D)
            dy = dy.contiguous()
            backward_kernel[(N,)](dy, y, scale, scale1, rstd, dx, dx1, D, BLOCK=BLOCK)
        return dx, dx1, None, None, None


op = Op(
    "corpus_row_scaled_norm",
    inputs={
        "x": Tensor("N D", grad=True),
        "x1": Tensor("N D", grad=True),
        "scale": Tensor("N", values=normal(0.3, mean=1.0)),
        "scale1": Tensor("N", values=normal(0.3, mean=1.0)),
    },
    params={"eps": 1e-5},
    outputs={"y": "N D"},
    cases=[Case(N=4, D=32), Case(N=3, D=20, why="a width that is no power of two")],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, x1, scale, scale1, eps):
    total = x * scale[:, None] + x1 * scale1[:, None]
    return total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)


@op.provider("triton", requires=("triton",), double_backward=False)
def candidate(x, x1, scale, scale1, eps):
    return Normed.apply(x, x1, scale, scale1, eps)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    wrong(
        "gradient_of_the_second_matrix_unscaled",
        (
            "dx1 + row * D + column, total * tl.load(scale1 + row)",
            "dx1 + row * D + column, total",
        ),
        fault="constant",
        result="grad x1",
    ),
]
