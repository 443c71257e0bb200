"""The mean over rows of the KL divergence of a target from log-probabilities, in Triton."""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.values import normal, uniform


@triton.jit
def forward_kernel(x, target, loss, V, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < V
    value = tl.load(x + row * V + column, mask=inside, other=0.0).to(tl.float32)
    p = tl.load(target + row * V + column, mask=inside, other=1.0).to(tl.float32)
    parts = tl.where(p == 0.0, 0.0, p * tl.log(p)) - p * value
    tl.store(loss + row, tl.sum(tl.where(inside, parts, 0.0), 0))


@triton.jit
def backward_kernel(target, dloss, dx, N, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    p = tl.load(target + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(dx + at, -p * (tl.load(dloss) / N), mask=at < n)


class Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, target):
        x, target = x.contiguous(), target.contiguous()
        N, V = x.shape
        loss = torch.zeros(N, dtype=torch.float32, device=x.device)
        if x.numel():
            forward_kernel[(N,)](x, target, loss, V, BLOCK=triton.next_power_of_2(V))
        ctx.save_for_backward(target)
        return loss.sum() / max(1, N)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dloss):
        (target,) = ctx.saved_tensors
        dx = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        if n := target.numel():
            grid = (triton.cdiv(n, 256),)
            backward_kernel[grid](target, dloss, dx, target.shape[0], n, BLOCK=256)
        return dx, None


op = Op(
    "corpus_kl_divergence",
    inputs={
        "x": Tensor("N V", grad=True, values=normal(1.0, mean=-3.0)),
        "target": Tensor("N V", values=uniform(0.0, 1.0)),
    },
    outputs={"loss": Tensor("", dtype=torch.float32)},
    cases=[Case(N=4, V=64), Case(N=3, V=100, why="width that is no power of two")],
)


@op.reference
def eager(x, target):
    wide = torch.promote_types(x.dtype, torch.float32)
    x, target = x.to(wide), target.to(wide)
    return (torch.xlogy(target, target) - target * x).sum() / max(1, x.shape[0])


@op.independent("torch.nn.functional.kl_div")
def stock(x, target):
    return torch.nn.functional.kl_div(x, target, reduction="batchmean")


@op.provider("triton", requires=("triton",), double_backward=False)
def candidate(x, target):
    return Divergence.apply(x, target)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # Zero times the logarithm of zero is NaN.
    wrong(
        "nan_for_a_probability_of_zero",
        ("tl.where(p == 0.0, 0.0, p * tl.log(p)) - p * value", "p * (tl.log(p) - value)"),
        fault="overflow",
        result="loss",
    ),
]
