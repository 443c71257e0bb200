"""Causal attention with FlashAttention's backward pass, whose terms cancel: the gradient of the
first query, which has one key, is zero in eager and here the rounding of a sum. The op declares how
large the terms are."""

import math

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_causal_attention_cancelling",
    inputs={name: Tensor("B H T K", grad=True) for name in ("q", "k", "v")},
    outputs={"o": "B H T K"},
    cases=[Case(B=1, H=2, T=17, K=16)],
    dtypes=(torch.float32,),
)


def masked(scores):
    T = scores.shape[-1]
    return scores.masked_fill(
        torch.ones(T, T, dtype=torch.bool, device=scores.device).triu(1), -math.inf
    )


@op.reference
def eager(q, k, v):
    return masked(q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


class Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        scores = masked(q @ k.mT * q.shape[-1] ** -0.5)
        largest = scores.amax(-1, keepdim=True)
        p = torch.exp(scores - largest)
        total = p.sum(-1, keepdim=True)
        o = p @ v / total
        ctx.save_for_backward(q, k, v, o, largest + torch.log(total))
        return o

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do):
        q, k, v, o, lse = (x.float() for x in ctx.saved_tensors)
        do = do.float()
        scale = do.shape[-1] ** -0.5
        p = torch.exp(masked(q @ k.mT * scale) - lse)
        delta = (o * do).sum(-1, keepdim=True)
        ds = p * (do @ v.mT - delta) * scale
        return ds @ k, ds.mT @ q, p.mT @ do


@op.provider("flash", double_backward=False)
def candidate(q, k, v):
    return Flash.apply(q, k, v)


@op.magnitude
def terms(q, k, v, upstream):
    scale = q.shape[-1] ** -0.5
    p = masked(q @ k.mT * scale).softmax(-1)
    dp2 = upstream["o"].square() @ v.square().mT
    ds2 = p.square() * (dp2 + (p.square() * dp2).sum(-1, keepdim=True))
    return {
        "grad q": scale * (ds2 @ k.square()).sqrt(),
        "grad k": scale * (ds2.mT @ q.square()).sqrt(),
    }


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # Nothing says how large terms are that the reference subtracts from themselves.
    right(
        "magnitude_undeclared",
        ("@op.magnitude\n", ""),
        open="accused by gradients, whose message asks for the declaration",
    ),
    wrong("delta_left_out", (" - delta)", ")"), fault="constant", result="grad q"),
    # The first query has one key, and its gradient is zero.
    wrong(
        "delta_of_first_query_left_out",
        ("        ds = p *", "        delta[:, :, :1] = 0\n        ds = p *"),
        fault="constant",
        result="grad q",
    ),
    wrong(
        "scale_left_out",
        ("(do @ v.mT - delta) * scale", "(do @ v.mT - delta)"),
        fault="constant",
        result="grad q",
    ),
]
