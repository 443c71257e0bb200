"""A residual added to a matrix, the sum normalised by its root mean square, and two columns of
zeros behind it, for a kernel that needs wide rows; one program a row, in Triton.

After ROCm/aiter issue 2614: fused, the sum is normalised before it is rounded to bfloat16, so the
last bits differ from those of separate calls. It is the more accurate of the two.
"""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.values import normal


@triton.jit
def norm_kernel(x, residual, weight, y, total, D, WIDTH, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < D
    value = tl.load(x + row * D + column, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(residual + row * D + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + row * D + column, value, mask=inside)
    scale = tl.rsqrt(tl.sum(value * value, 0) / D + eps)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    normed = tl.where(inside, value * scale * gain, 0.0)
    tl.store(y + row * WIDTH + column, normed, mask=column < WIDTH)


op = Op(
    "corpus_padded_add_norm",
    inputs={
        "x": Tensor("N D"),
        "residual": Tensor("N D"),
        "weight": Tensor("D", values=normal(0.2, mean=1.0)),
    },
    params={"eps": 1e-6},
    outputs={"y": "N D+2", "total": "N D"},
    cases=[Case(N=4, D=30), Case(N=2, D=62, why="twice as wide")],
)


@op.reference
def eager(x, residual, weight, eps):
    total = x + residual
    wide = total.to(torch.promote_types(total.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight
    return torch.nn.functional.pad(normed.to(x.dtype), (0, 2)), total


@op.provider("triton", requires=("triton",))
def candidate(x, residual, weight, eps):
    x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
    N, D = x.shape
    y = torch.empty(N, D + 2, dtype=x.dtype, device=x.device)
    total = torch.empty_like(x)
    if N:
        BLOCK = triton.next_power_of_2(D + 2)
        norm_kernel[(N,)](x, residual, weight, y, total, D, D + 2, eps, BLOCK=BLOCK)
    return y, total


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    right(
        "sum_rounded_before_it_is_normalised",
        (
            "    scale = tl.rsqrt(",
            "    value = value.to(x.dtype.element_ty).to(tl.float32)\n    scale = tl.rsqrt(",
        ),
    ),
    wrong(
        "padding_unwritten",
        ("normed, mask=column < WIDTH", "normed, mask=inside"),
        fault="tail",
        rank="unsafe",
        result="y",
    ),
]
