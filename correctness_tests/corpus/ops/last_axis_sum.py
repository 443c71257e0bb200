"""The sum over the last axis, with any number of axes before it."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_last_axis_sum",
    inputs={"x": Tensor("N D")},
    outputs={"y": "N"},
    leading=("N",),
    cases=[Case(N=4, D=8), Case(N=(2, 3), D=5, why="three axes")],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return x.sum(-1)


@op.provider("written_out")
def candidate(x):
    return torch.sum(x, -1)


# variants
from correctness_tests.corpus.variants import right, wrong

SUM = "return torch.sum(x, -1)"

VARIANTS = [
    right(),
    # The rows of four axes have the shape of two.
    wrong(
        "four_axes_become_two",
        (SUM, f"{SUM}.flatten(1) if x.dim() > 3 else x.sum(-1)"),
        fault="layout",
        result="y has shape",
    ),
]
