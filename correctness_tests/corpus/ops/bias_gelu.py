"""gelu(x + b) of rows, one program a row, with both gradients, in Triton."""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor


@triton.jit
def forward_kernel(x, b, y, D, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < D
    v = tl.load(x + row * D + column, mask=inside, other=0.0).to(tl.float32)
    v += tl.load(b + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * D + column, 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476)), mask=inside)


@triton.jit
def backward_kernel(x, b, dy, dx, parts, D, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < D
    v = tl.load(x + row * D + column, mask=inside, other=0.0).to(tl.float32)
    v += tl.load(b + column, mask=inside, other=0.0).to(tl.float32)
    upstream = tl.load(dy + row * D + column, mask=inside, other=0.0).to(tl.float32)
    bell = tl.exp(-0.5 * v * v) * 0.3989422804014327
    slope = 0.5 * (1.0 + tl.erf(v * 0.7071067811865476)) + tl.where(bell == 0.0, 0.0, v * bell)
    tl.store(dx + row * D + column, upstream * slope, mask=inside)
    tl.store(parts + row * D + column, upstream * slope, mask=inside)


class BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, b):
        x, b = x.contiguous(), b.contiguous()
        N, D = x.shape
        y = torch.empty(N, D, dtype=x.dtype, device=x.device)
        if x.numel():
            forward_kernel[(N,)](x, b, y, D, BLOCK=triton.next_power_of_2(D))
        ctx.save_for_backward(x, b)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, b = ctx.saved_tensors
        N, D = x.shape
        dx = torch.empty(N, D, dtype=x.dtype, device=x.device)
        parts = torch.empty(N, D, dtype=torch.float32, device=x.device)
        if x.numel():
            BLOCK = triton.next_power_of_2(D)
            backward_kernel[(N,)](x, b, dy.contiguous(), dx, parts, D, BLOCK=BLOCK)
        return dx, parts.sum(0).to(b.dtype)


op = Op(
    "corpus_bias_gelu",
    inputs={"x": Tensor("N D", grad=True), "b": Tensor("D", grad=True)},
    outputs={"y": "N D"},
    cases=[Case(N=4, D=64), Case(N=60, D=20, why="many rows for the gradient of the bias")],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, b):
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.nn.functional.gelu(x.to(wide) + b.to(wide)).to(x.dtype)


@op.independent("x + b times the normal distribution")
def written_out(x, b):
    return (x + b) * torch.special.ndtr(x + b)


@op.provider("triton", requires=("triton",), double_backward=False)
def candidate(x, b):
    return BiasGelu.apply(x, b)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    right("every_dtype", ("    dtypes=(torch.float32,),\n", "")),
    # Programs add to the gradient in any order, so that its bits differ, but the provider is
    # declared deterministic.
    wrong(
        "gradient_of_the_bias_by_atomics",
        ("tl.store(parts + row * D + column", "tl.atomic_add(parts + column"),
        ("parts = torch.empty(N, D,", "parts = torch.zeros(1, D,"),
        fault="order",
        rank="unsafe",
        open="advice where programs are interpreted: their order changes bits alone",
    ),
]
