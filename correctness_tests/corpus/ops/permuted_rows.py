"""Rows in the order of a permutation."""

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.declare.values import Values


def permutation(shape, generator):
    return torch.randperm(*shape, generator=generator)


op = Op(
    "corpus_permuted_rows",
    inputs={
        "x": Tensor("N D"),
        "order": Tensor("N", dtype=torch.int64, values=Values("permutation", permutation)),
    },
    outputs={"y": "N D"},
    cases=[Case(N=9, D=8), Case(N=7, D=5)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, order):
    return x[order]


@op.provider("index_select")
def candidate(x, order):
    return x.index_select(0, order)


# variants
from correctness_tests.corpus.variants import right, wrong

CALL = "    return x.index_select(0, order)\n"

VARIANTS = [
    right(),
    # An order whose ends are in place is taken for the identity.
    wrong(
        "identity_by_its_ends",
        (
            CALL,
            "    if order[0] == 0 and order[-1] == len(order) - 1:\n        return x.clone()\n"
            + CALL,
        ),
        fault="constant",
        result="y",
    ),
]
