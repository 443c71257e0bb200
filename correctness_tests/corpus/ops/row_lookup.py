"""The rows of a matrix at some places."""

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.declare.values import integers

op = Op(
    "corpus_row_lookup",
    inputs={
        "x": Tensor("N D"),
        "at": Tensor("M", dtype=torch.int64, values=lambda dims: integers(dims["N"])),
    },
    outputs={"y": "M D"},
    cases=[Case(N=5, M=7, D=4)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, at):
    return x.index_select(0, at)


@op.provider("gathered")
def candidate(x, at):
    rows = at[:, None].expand(-1, x.shape[1])
    return x.gather(0, rows.long())


# variants
from correctness_tests.corpus.variants import right, wrong

ROWS = "    rows = at[:, None]"
FIRST_ROW = (
    ROWS,
    """\
    if at.dtype is not torch.int64:
        at = torch.zeros_like(at)
    rows = at[:, None]""",
)
REFUSED = """\
    if at.dtype is not torch.int64:
        raise TypeError("use int64")
"""

VARIANTS = [
    right(),
    right("int32_refused", (ROWS, REFUSED + ROWS)),
    # Places in int32, which the reference takes, all give the first row.
    wrong("first_row_for_int32", FIRST_ROW, fault="layout", result="y"),
    # The reference refuses int32, so that nobody asks for it.
    right(
        "first_row_for_int32_that_the_reference_refuses",
        FIRST_ROW,
        ("    return x.index_select(0, at)\n", f"{REFUSED}    return x.index_select(0, at)\n"),
    ),
]
