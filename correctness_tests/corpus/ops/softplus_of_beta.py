"""Softplus with a factor."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_softplus_of_beta",
    inputs={"x": Tensor("N D")},
    outputs={"y": "N D"},
    params={"beta": 1.0},
    cases=[Case(N=4, D=12)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, beta):
    return torch.nn.functional.softplus(x, beta)


@op.provider("fused")
def candidate(x, beta):
    scaled = x * beta
    return torch.where(scaled > 20, x, scaled.exp().log1p() / beta)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # The threshold is asked of x and not of x times beta, of which the exponential overflows.
    wrong(
        "threshold_of_x",
        ("torch.where(scaled > 20,", "torch.where(x > 20,"),
        fault="overflow",
        result="y",
    ),
]
