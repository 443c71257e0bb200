"""The softmax of each of the groups of a row, from its logsumexp, as kernels do that save that."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_softmax_in_groups",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N D"},
    params={"groups": 2},
    cases=[Case(N=5, D=50), Case(N=1, D=64, why="one row")],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, groups):
    return x.unflatten(1, (groups, -1)).softmax(-1).flatten(1)


@op.provider("logsumexp")
def candidate(x, groups):
    parts = x.unflatten(1, (groups, -1))
    y = (parts - parts.logsumexp(-1, keepdim=True)).exp()
    return y.flatten(1)


# variants
from correctness_tests.corpus.variants import right, wrong

PARTS = "    parts = x.unflatten(1, (groups, -1))\n"
SEVERAL_ROWS = 'Case(N=5, D=50), Case(N=1, D=64, why="one row")', "Case(N=5, D=8)"
REFUSED = PARTS, f'    if len(x) < 2:\n        raise ValueError("use 2 rows or more")\n{PARTS}'
VARIANTS = [
    right(),
    # A single group of columns cannot be split in two: the op takes no axis of one column.
    right("of_few_columns", SEVERAL_ROWS),
    # To refuse a size is no wrong result.
    right("one_row_refused_alone", SEVERAL_ROWS, REFUSED),
    wrong(
        "large_numbers_too_large_by_a_thousandth",
        ("return y.flatten(1)", "return y.flatten(1) * torch.where(x > 100, 1.001, 1.0)"),
        fault="overflow",
        result="y",
    ),
    wrong("one_row_refused", SEVERAL_ROWS, REFUSED, fault="tail", rank="refused"),
    # One row is returned as it is.
    wrong(
        "one_row_returned_as_it_is",
        SEVERAL_ROWS,
        (PARTS, f"    if len(x) < 2:\n        return x\n{PARTS}"),
        fault="aliasing",
        result="y",
    ),
]
