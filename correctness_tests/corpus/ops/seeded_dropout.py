"""Dropout whose mask follows from a seed and the place of an element."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_seeded_dropout",
    inputs={"x": Tensor("N D")},
    outputs={"y": "N D"},
    params={"seed": 7},
    cases=[Case(N=4, D=12)],
    dtypes=(torch.float32,),
)


def dropout_mask(x, seed):
    place = torch.arange(x.numel(), device=x.device).view(x.shape)
    return (place * 7919 + seed * 31) % 5 > 1


@op.reference
def eager(x, seed):
    return x * dropout_mask(x, seed)


@op.provider("fused")
def candidate(x, seed):
    return torch.where(dropout_mask(x, seed), x, x * 0)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # A seed of zero is taken for none.
    wrong(
        "seed_of_zero_is_none",
        (
            "    return torch.where(dropout_mask(x, seed), x, x * 0)",
            "    return torch.where(dropout_mask(x, seed), x, x * 0) if seed else x.clone()",
        ),
        fault="constant",
        result="y",
    ),
]
