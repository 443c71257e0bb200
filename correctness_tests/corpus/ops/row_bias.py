"""A number added to each row of a matrix."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_row_bias",
    inputs={"x": Tensor("N D"), "bias": Tensor("N")},
    outputs={"y": "N D"},
    cases=[Case(N=4, D=64)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, bias):
    return x + bias[:, None]


def unsupported(dims):
    return None if dims["D"] == 64 and not 4 < dims["N"] < 4000 else "neither few rows nor many"


@op.provider("written_out", supports=unsupported)
def candidate(x, bias):
    y = torch.add(x, bias[:, None])
    return y


# variants
from correctness_tests.corpus.variants import right

SUM = "y = torch.add(x, bias[:, None])"
LAST_ROWS = "y = torch.cat([y[:262150], 1.1 * y[262150:]])"
TORCH = f"""@op.provider("torch")
def library(x, bias):
    {SUM}
    {LAST_ROWS}
    return y


def unsupported"""

VARIANTS = [
    right(),
    # torch's own implementation gives the same there.
    right(
        "last_rows_as_of_torch",
        (f"{SUM}\n", f"{SUM}\n    {LAST_ROWS}\n"),
        ("def unsupported", TORCH),
    ),
]
