"""A matrix times a table that is the same in every call, as of positions."""

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.declare.values import Values


def counted(shape, generator):
    return 1 + torch.arange(shape[0] * shape[1], dtype=torch.float64).view(shape)


op = Op(
    "corpus_position_table",
    inputs={
        "x": Tensor("N D", grad=True),
        "table": Tensor("N D", values=Values("counted", counted)),
    },
    outputs={"y": "N D"},
    cases=[Case(N=5, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, table):
    return x * table


@op.provider("written_out")
def candidate(x, table):
    return table * x


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # The first table of a length is used for all of that length.
    wrong(
        "table_by_its_length",
        ('@op.provider("written_out")', 'TABLES = {}\n\n\n@op.provider("written_out")'),
        ("return table * x", "return TABLES.setdefault(len(table), table.clone()) * x"),
        fault="stale state",
        result="y",
    ),
]
