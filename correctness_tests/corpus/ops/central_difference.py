"""Slopes of rows: central differences, and one-sided ones at both ends."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_central_difference",
    inputs={"x": Tensor("N D")},
    outputs={"y": "N D"},
    cases=[Case(D=12, N=4)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    if x.shape[-1] < 2:
        return 0 * x
    inner = (x[:, 2:] - x[:, :-2]) / 2
    return torch.cat([x[:, 1:2] - x[:, :1], inner, x[:, -1:] - x[:, -2:-1]], -1)


@op.provider("fused")
def candidate(x):
    y = torch.zeros_like(x)
    if x.shape[-1] > 1:
        y[:, 1:-1] = (x[:, 2:] - x[:, :-2]) / 2
        y[:, 0] = x[:, 1] - x[:, 0]
        y[:, -1] = x[:, -1] - x[:, -2]
    return y


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # Of two points the last one has no slope.
    wrong(
        "last_slope_of_two_points",
        (
            "        y[:, -1] = x[:, -1] - x[:, -2]",
            """        if x.shape[-1] > 2:
            y[:, -1] = x[:, -1] - x[:, -2]""",
        ),
        fault="tail",
        result="y",
    ),
]
