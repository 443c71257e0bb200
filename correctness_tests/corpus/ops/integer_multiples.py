"""Rows times an integer for each of them."""

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.declare.values import integers

op = Op(
    "corpus_integer_multiples",
    inputs={
        "x": Tensor("N D", grad=True),
        "by": Tensor("N", dtype=torch.int64, values=lambda dims: integers(6)),
    },
    outputs={"y": "N D"},
    cases=[Case(N=5, D=8), Case(N=3, D=50, why="ragged")],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, by):
    return x * by[:, None]


@op.provider("rows")
def candidate(x, by):
    y = x * by.unsqueeze(1)
    return y


# variants
from correctness_tests.corpus.variants import right, wrong

RETURN = "    return y\n"
VARIANTS = [
    right(),
    wrong(
        "one_more_if_all_integers_are_zero",
        (RETURN, "    if not by.any():\n        y = y + 1\n" + RETURN),
        fault="constant",
        result="y",
    ),
    wrong(
        "one_more_if_all_integers_are_the_largest",
        (RETURN, "    if (by == 5).all():\n        y = y + 1\n" + RETURN),
        fault="constant",
        result="y",
    ),
]
