"""Attention to a few keys, with FlashAttention's backward pass. With one key, the terms of the
query's gradient cancel to zero."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_short_attention",
    inputs={
        "q": Tensor("T K", grad=True),
        "k": Tensor("S K", grad=True),
        "v": Tensor("S K", grad=True),
    },
    outputs={"o": "T K"},
    cases=[Case(T=2, S=3, K=8), Case(T=1, S=1, K=16, why="the gradient of q is exactly zero")],
    dtypes=(torch.float32,),
)


@op.reference
def eager(q, k, v):
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


@op.magnitude
def terms(q, k, v, upstream):
    """Root of the sum of the squares of the terms of dq and dk, of which P (dP - delta) cancels."""
    scale = q.shape[-1] ** -0.5
    p = (q @ k.mT * scale).softmax(-1)
    dp2 = upstream["o"].square() @ v.square().mT
    ds2 = p.square() * (dp2 + (p.square() * dp2).sum(-1, keepdim=True))
    return {
        "grad q": scale * (ds2 @ k.square()).sqrt(),
        "grad k": scale * (ds2.mT @ q.square()).sqrt(),
    }


class ShortAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        p = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        o = p @ v
        ctx.save_for_backward(q, k, v, p, o)
        return o

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do):
        q, k, v, p, o = (
            x.to(torch.promote_types(x.dtype, torch.float32)) for x in ctx.saved_tensors
        )
        do = do.to(p.dtype)
        delta = (o * do).sum(-1, keepdim=True)
        ds = p * (do @ v.mT - delta) * q.shape[-1] ** -0.5
        return ds @ k, ds.mT @ q, p.mT @ do


@op.provider("flash", double_backward=False)
def candidate(q, k, v):
    return ShortAttention.apply(q, k, v)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    wrong(
        "delta_left_out",
        ("(do @ v.mT - delta)", "(do @ v.mT)"),
        fault="gradient missing",
        result="grad q",
    ),
    # The op says nothing of terms that cancel, so that nothing tells rounding from a fault.
    right(
        "terms_not_declared",
        ("@op.magnitude\n", ""),
        open="sizes, special values: grad q of one key",
    ),
]
