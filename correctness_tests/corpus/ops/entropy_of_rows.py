"""Entropy of rows of probabilities."""

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.values import uniform

op = Op(
    "corpus_entropy_of_rows",
    inputs={"p": Tensor("N D", values=uniform(0.0, 1.0))},
    outputs={"y": "N"},
    cases=[Case(N=4, D=12)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(p):
    return -torch.special.xlogy(p, p).sum(-1)


@op.provider("fused")
def candidate(p):
    logarithm = torch.where(p > 0, p, 1).log()
    return -(p * logarithm).sum(-1)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # A probability of zero times its logarithm is a NaN.
    wrong(
        "logarithm_of_zero",
        ("torch.where(p > 0, p, 1).log()", "p.log()"),
        fault="overflow",
        result="y",
    ),
]
