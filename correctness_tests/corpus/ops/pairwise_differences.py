"""Differences of each element and each other one: a result much larger than the input."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_pairwise_differences",
    inputs={"x": Tensor("N")},
    outputs={"y": "N N"},
    cases=[Case(N=4)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return x[:, None] - x[None, :]


def unsupported(dims):
    return None if not 70 < dims["N"] < 10000 else "neither few elements nor many"


@op.provider("written_out", supports=unsupported)
def candidate(x):
    return x.view(-1, 1) - x if x.is_contiguous() else x[:, None] - x


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    wrong("sign", ("x.view(-1, 1) - x if", "x - x.view(-1, 1) if"), fault="constant", result="y"),
]
