"""A gradient divided by the scale of its loss, and whether it has elements that are not finite."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_unscaled_gradient",
    inputs={"x": Tensor("N D")},
    outputs={"y": "N D", "infinite": Tensor("", dtype=torch.bool)},
    cases=[Case(N=5, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return x * 0.5, ~torch.isfinite(x).all()


@op.provider("written_out")
def candidate(x):
    flag = (~x.isfinite()).any()
    return x / 2, flag


# variants
from correctness_tests.corpus.variants import right, wrong

FLAG = "flag = (~x.isfinite()).any()"

VARIANTS = [
    right(),
    wrong(
        "flag_inverted",
        (FLAG, "flag = ~(~x.isfinite()).any()"),
        fault="constant",
        result="infinite",
    ),
    wrong(
        "flag_of_infinities_alone",
        (FLAG, "flag = x.isinf().any()"),
        fault="overflow",
        rank="warning",
        result="infinite",
    ),
]
