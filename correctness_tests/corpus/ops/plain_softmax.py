"""The softmax of each row of a matrix."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_plain_softmax",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N D"},
    cases=[Case(N=5, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return torch.softmax(x, -1)


@op.provider("written_out")
def candidate(x):
    shifted = x - x.detach().amax(-1, keepdim=True)
    return shifted.exp() / shifted.exp().sum(-1, keepdim=True)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    right("reference", eager=True),
    wrong(
        "maximum_not_subtracted",
        (" - x.detach().amax(-1, keepdim=True)", ""),
        fault="overflow",
        result="y",
    ),
]
