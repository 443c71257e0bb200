"""Logsumexp of rows, shifted by the largest element as online softmax does: a NaN for a row with
infinity, which some code of torch gives, too."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_shifted_logsumexp",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N"},
    cases=[Case(N=5, D=8), Case(N=3, D=50, why="ragged")],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return x.logsumexp(-1)


@op.independent("of log_softmax")
def written_out(x):
    return (x - x.log_softmax(-1))[:, 0]


@op.provider("shifted")
def candidate(x):
    largest = x.detach().amax(-1, keepdim=True)
    return (x - largest).exp().sum(-1).log() + largest[:, 0]


# variants
from correctness_tests.corpus.variants import right, wrong

LARGEST, END = "amax(-1, keepdim=True)\n", "+ largest[:, 0]\n"
INDEPENDENT = '@op.independent("of log_softmax")\n', ""
VARIANTS = [
    right(),
    right("without_independent_code", INDEPENDENT),
    right("without_gradient", ("grad=True", "grad=False"), INDEPENDENT),
    # The row with minus infinity is a NaN, where all other code has a number.
    wrong(
        "minus_infinity_makes_its_row_nan",
        (END, "+ largest[:, 0] + 0 * x.detach().amin(-1)\n"),
        INDEPENDENT,
        fault="overflow",
        result="y",
    ),
    # An infinity in one row is a NaN in all others.
    wrong(
        "infinity_makes_all_rows_nan",
        (END, "+ largest[:, 0] + 0 * x.detach().sum()\n"),
        INDEPENDENT,
        fault="overflow",
        result="y",
    ),
    # The maximum begins at -10,000, which stands for minus infinity.
    wrong(
        "maximum_from_a_finite_number",
        (LARGEST, "amax(-1, keepdim=True).clamp_min(-1e4)\n"),
        INDEPENDENT,
        fault="overflow",
        result="y",
    ),
]
