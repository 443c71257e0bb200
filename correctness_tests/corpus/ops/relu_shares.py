"""Shares of the positive part of a row, which are NaN where nothing is positive."""

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.declare.values import Values

op = Op(
    "corpus_relu_shares",
    inputs={
        "x": Tensor(
            "N D",
            values=Values("negative", lambda shape, _: -torch.ones(shape, dtype=torch.float64)),
        )
    },
    outputs={"y": "N D"},
    cases=[Case(N=5, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return x.relu() / x.relu().sum(-1, True)


@op.provider("written_out")
def candidate(x):
    positive = x.clamp(min=0)
    y = torch.empty_like(x)
    y[:] = positive / positive.sum(-1, True)
    return y


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # What was in memory may be NaN, as the right result is.
    wrong(
        "first_column_unwritten",
        (
            "y[:] = positive / positive.sum(-1, True)",
            "y[:, 1:] = (positive / positive.sum(-1, True))[:, 1:]",
        ),
        fault="stale state",
        rank="unsafe",
        result="5 of 40 elements",
    ),
]
