"""The positive elements of a matrix, and zero in the place of the others."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_positive_part",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N D"},
    cases=[Case(N=5, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return torch.where(x > 0, x, 0.0)


@op.provider("written_out")
def candidate(x):
    return x.masked_fill(x <= 0, 0.0)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    right("reference", eager=True),
    # An infinity times 0 is a NaN.
    wrong(
        "product_with_the_mask",
        ("x.masked_fill(x <= 0, 0.0)", "x * (x > 0)"),
        fault="overflow",
    ),
]
