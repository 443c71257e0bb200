"""Log-softmax of the rows of a matrix, one program a row, with both passes in Triton."""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor


@triton.jit
def forward_kernel(x, y, statistics, D, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    value = tl.load(x + row * D + column, mask=column < D, other=-float("inf")).to(tl.float32)
    largest = tl.max(value, 0)
    log_sum = tl.log(tl.sum(tl.exp(value - largest), 0))
    tl.store(y + row * D + column, value - largest - log_sum, mask=column < D)
    tl.store(statistics + 2 * row, largest)
    tl.store(statistics + 2 * row + 1, log_sum)


@triton.jit
def backward_kernel(x, statistics, dy, dx, D, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    value = tl.load(x + row * D + column, mask=column < D, other=-float("inf")).to(tl.float32)
    upstream = tl.load(dy + row * D + column, mask=column < D, other=0.0).to(tl.float32)
    largest, log_sum = tl.load(statistics + 2 * row), tl.load(statistics + 2 * row + 1)
    probability = tl.exp(value - largest - log_sum)
    tl.store(dx + row * D + column, upstream - probability * tl.sum(upstream, 0), mask=column < D)


class LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        y = torch.empty_like(x)
        N, D = x.shape
        statistics = torch.empty(N, 2, dtype=torch.float32, device=x.device)
        if x.numel():
            forward_kernel[(N,)](x, y, statistics, D, BLOCK=triton.next_power_of_2(D))
        ctx.save_for_backward(x, statistics)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, statistics = ctx.saved_tensors
        N, D = x.shape
        dx = torch.empty_like(x)
        if x.numel():
            BLOCK = triton.next_power_of_2(D)
            backward_kernel[(N,)](x, statistics, dy.contiguous(), dx, D, BLOCK=BLOCK)
        return dx


op = Op(
    "corpus_log_softmax",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N D"},
    cases=[Case(N=4, D=64), Case(N=3, D=100, why="width that is no power of two")],
)


@op.reference
def eager(x):
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.log_softmax(x, -1, dtype=wide).to(x.dtype)


@op.independent("x minus logsumexp")
def written_out(x):
    return x - torch.logsumexp(x, -1, keepdim=True)


@op.provider("triton", requires=("triton",), double_backward=False)
def candidate(x):
    return LogSoftmax.apply(x)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # empty_like keeps the layout of a transposed input, which the kernel then fills as if dense.
    wrong(
        "output_like_transposed_input",
        (
            "x = x.contiguous()\n        y = torch.empty_like(x)",
            "y = torch.empty_like(x)\n        x = x.contiguous()",
        ),
        fault="layout",
        result="y",
    ),
    wrong(
        "load_without_mask",
        (
            'mask=column < D, other=-float("inf")).to(tl.float32)\n    largest = tl.max',
            ").to(tl.float32)\n    largest = tl.max",
        ),
        fault="out of bounds",
        rank="unsafe",
    ),
]
