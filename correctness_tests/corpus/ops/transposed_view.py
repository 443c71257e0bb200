"""The transpose of a matrix, as a view: its output shares memory with its input by design."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_transposed_view",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "D N"},
    cases=[Case(N=5, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return x.T


@op.provider("view")
def candidate(x):
    return x.transpose(0, 1)


# variants
from correctness_tests.corpus.variants import right

VARIANTS = [
    right(),
]
