"""A matrix divided by its norm; the reference refuses one that is all zero."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_unit_norm",
    inputs={"x": Tensor("N D")},
    outputs={"y": "N D"},
    cases=[Case(N=5, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    if not x.any():
        raise RuntimeError("nothing to normalise")
    return x / x.norm()


@op.provider("written_out")
def candidate(x):
    norm = x.square().sum().sqrt()
    return x / norm


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # What a reference raises is not the candidate's fault.
    right("reference_raises", ("if not x.any():", "if x is not None:")),
    wrong(
        "norm_at_least_a_hundredth",
        ("sum().sqrt()", "sum().sqrt().clamp(0.01)"),
        fault="constant",
        result="y",
    ),
]
