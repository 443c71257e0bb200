"""A softmax that is right only where its upstream gradient is contiguous: see README."""

import torch
import triton
import triton.language as tl


@triton.jit
def forward_kernel(x, y, n_columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * n_columns
    column = tl.arange(0, BLOCK)
    inside = column < n_columns
    value = tl.load(x + row + column, mask=inside, other=float("-inf")).to(tl.float32)
    exponential = tl.exp(value - tl.max(value, 0))
    tl.store(y + row + column, exponential / tl.sum(exponential, 0), mask=inside)


@triton.jit
def backward_kernel(y, dy, dx, n_columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * n_columns
    column = tl.arange(0, BLOCK)
    inside = column < n_columns
    p = tl.load(y + row + column, mask=inside, other=0.0).to(tl.float32)
    upstream = tl.load(dy + row + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx + row + column, p * (upstream - tl.sum(p * upstream, 0)), mask=inside)


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        y = torch.empty_like(x)
        rows, columns = x.numel() // x.shape[-1], x.shape[-1]
        forward_kernel[(rows,)](x, y, columns, BLOCK=triton.next_power_of_2(columns))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        dx = torch.empty_like(y)
        rows, columns = y.numel() // y.shape[-1], y.shape[-1]
        # The mistake: dy may have any strides. That of y.sum() is one element with stride 0.
        backward_kernel[(rows,)](y, dy, dx, columns, BLOCK=triton.next_power_of_2(columns))
        return dx


def softmax(x, dim=-1):
    assert dim == -1
    return Softmax.apply(x)
