"""The transpose of a matrix, in memory of its own."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_transposed_copy",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "D N"},
    cases=[Case(N=5, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return x.T.clone(memory_format=torch.contiguous_format)


@op.provider("written_out")
def candidate(x):
    y = x.new_empty(x.shape[1], x.shape[0])
    return y.copy_(x.T)


# variants
from correctness_tests.corpus.variants import right, wrong

COPY = "    y = x.new_empty(x.shape[1], x.shape[0])\n    return y.copy_(x.T)\n"

VARIANTS = [
    right(),
    right("reference", eager=True),
    # The transpose of one row is contiguous already, and so is a view.
    wrong(
        "view_of_one_row",
        (COPY, "    return x.T.contiguous()\n"),
        fault="aliasing",
        rank="unsafe",
    ),
]
