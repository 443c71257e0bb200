"""The sum of many rows, added one after the other."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_column_total",
    inputs={"x": Tensor("N D")},
    outputs={"y": "D"},
    cases=[Case(N=500, D=16)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return x.sum(0)


@op.provider(
    "written_out", supports=lambda dims: None if max(dims.values()) <= 1025 else "a large matrix"
)
def candidate(x):
    total = torch.zeros(x.shape[1], dtype=x.dtype, device=x.device)
    for row in x:
        total = total + row
    return total


# variants
from correctness_tests.corpus.variants import right, wrong

SUM = """total = torch.zeros(x.shape[1], dtype=x.dtype, device=x.device)
    for row in x:
        total = total + row
    return total
"""

VARIANTS = [
    # The roundings of rows that are all equal, as expanded ones are, add up.
    right(),
    # Rows that lie at one address are counted a little too often.
    wrong(
        "expanded_rows_too_large",
        (SUM, "return x.sum(0) * (1 + 1e-3 * (not x.stride(0)))\n"),
        fault="layout",
        result="y",
    ),
]
