"""RMSNorm over the last axis of three, whose rows are taken as those of a matrix.

After Dao-AILab/quack issue 88.
"""

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.values import normal

op = Op(
    "corpus_viewed_rms_norm",
    inputs={
        "x": Tensor("B T D", grad=True),
        "weight": Tensor("D", grad=True, values=normal(0.2, mean=1.0)),
    },
    params={"eps": 1e-6},
    outputs={"y": "B T D"},
    cases=[Case(B=2, T=3, D=16), Case(B=1, T=4, D=9, why="odd width")],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        rows = x.reshape(-1, x.shape[-1])
        rstd = torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(rows, weight, rstd)
        return (rows * rstd * weight).view(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        rows, weight, rstd = ctx.saved_tensors
        upstream = dy.reshape(rows.shape)
        normed = rows * rstd
        inner = (upstream * weight * normed).mean(-1, keepdim=True)
        dx = rstd * (upstream * weight - normed * inner)
        return dx.view(dy.shape), (upstream * normed).sum(0), None


@op.provider("written_out", double_backward=False)
def candidate(x, weight, eps):
    return Norm.apply(x, weight, eps)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # The gradient behind a sum is expanded, and cannot be viewed as a matrix: an error.
    wrong(
        "upstream_gradient_viewed",
        ("dy.reshape(rows.shape)", "dy.view(rows.shape)"),
        fault="layout",
        rank="refused",
        result="view",
    ),
]
