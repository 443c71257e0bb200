"""Rows divided by their norm plus an epsilon."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_rows_with_epsilon",
    inputs={"x": Tensor("N D")},
    outputs={"y": "N D"},
    params={"eps": 1e-8},
    cases=[Case(N=4, D=12)],
    dtypes=(torch.float32, torch.float16),
)


def widened(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


@op.reference
def eager(x, eps):
    wide = widened(x)
    return (wide / (torch.linalg.vector_norm(wide, dim=-1, keepdim=True) + eps)).to(x.dtype)


@op.provider("fused")
def candidate(x, eps):
    wide = widened(x)
    norm = wide.square().sum(-1, keepdim=True).sqrt()
    return (wide / (norm + eps)).to(x.dtype)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # Epsilon is added in float16, where it is zero.
    wrong(
        "epsilon_in_float16",
        ("(norm + eps)", "(norm.to(x.dtype) + eps)"),
        fault="overflow",
        result="y",
    ),
]
