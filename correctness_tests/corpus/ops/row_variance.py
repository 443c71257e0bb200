"""The variance of each row, computed of its mean and squares."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_row_variance",
    inputs={"x": Tensor("N D")},
    outputs={"y": "N"},
    cases=[Case(D=64, N=4), Case(D=50, N=3, why="no multiple of a block")],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return x.var(1, correction=0)


@op.provider("written_out")
def candidate(x):
    y = x.var(1, correction=0)
    return y


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # A last block of 64 with one column has no variance of its own: 0 / 0.
    wrong(
        "last_block_of_one_column",
        (
            "    y = x.var(1, correction=0)\n",
            """    y = x.var(1, correction=0)
    if x.shape[1] > 64:
        last = x[:, (x.shape[1] - 1) // 64 * 64 :]
        of_last = (last - last.mean(1, keepdim=True)).square().sum(1) / (last.shape[1] - 1)
        y = y + 0 * of_last
""",
        ),
        fault="tail",
        result="y",
    ),
]
