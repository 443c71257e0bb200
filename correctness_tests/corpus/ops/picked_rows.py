"""The rows of a matrix in the order of a permutation."""

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.declare.values import Values


def permutation(shape, generator):
    return torch.randperm(shape[0], generator=generator)


op = Op(
    "corpus_picked_rows",
    inputs={
        "x": Tensor("N D", grad=True),
        "order": Tensor("N", dtype=torch.int64, values=Values("permutation", permutation)),
    },
    outputs={"y": "N D"},
    cases=[Case(N=6, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, order):
    return x[order]


@op.provider("written_out")
def candidate(x, order):
    return x.index_select(0, order)


# variants
from correctness_tests.corpus.variants import right

VARIANTS = [
    right(),
    # Every draw is a permutation, so a call may rely on it.
    right(
        "permutation_required",
        (
            "    return x.index_select(0, order)\n",
            """\
    assert order.unique().numel() == len(order)
    return x.index_select(0, order)
""",
        ),
    ),
]
