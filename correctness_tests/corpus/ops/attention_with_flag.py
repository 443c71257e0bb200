"""Attention that is causal if a parameter says so, which each declared case does, with a backward
pass of its own.

After triton-lang/triton issues 5660 and 4174.
"""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_attention_with_flag",
    inputs={name: Tensor("T D", grad=True) for name in ("q", "k", "v")},
    params={"causal": True},
    outputs={"y": "T D"},
    cases=[Case(T=6, D=8), Case(T=5, D=4, why="odd length")],
    dtypes=(torch.float32,),
)


def weights(q, k, causal):
    scores = q @ k.T * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1)


@op.reference
def eager(q, k, v, causal):
    return weights(q, k, causal) @ v


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal):
        ctx.save_for_backward(q, k, v)
        ctx.causal = causal
        return weights(q, k, causal) @ v

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        q, k, v = ctx.saved_tensors
        dy = dy.to(q.dtype)
        p = weights(q, k, ctx.causal)
        dp = dy @ v.T
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        return ds @ k, ds.T @ q, p.T @ dy, None


@op.provider("written_out", double_backward=False)
def candidate(q, k, v, causal):
    return Attention.apply(q, k, v, causal)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    wrong(
        "backward_always_causal",
        ("weights(q, k, ctx.causal)", "weights(q, k, True)"),
        fault="constant",
        result="grad",
    ),
    # Under autocast the output is bfloat16, and so is its gradient, which meets float32: an error.
    wrong(
        "upstream_gradient_in_the_dtype_of_autocast",
        ("        dy = dy.to(q.dtype)\n", ""),
        fault="framework",
        rank="refused",
        result="dtype",
    ),
]
