"""Which elements of a matrix are positive."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_positive_mask",
    inputs={"x": Tensor("N D")},
    outputs={"y": Tensor("N D", dtype=torch.bool)},
    cases=[Case(N=5, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return x > 0


@op.provider("written_out")
def candidate(x):
    return torch.gt(x, 0)


# variants
from correctness_tests.corpus.variants import right, wrong

MASK = "torch.gt(x, 0)"

VARIANTS = [
    right(),
    # A NaN is called positive.
    wrong(
        "nan_is_positive",
        (MASK, "~(x <= 0)"),
        fault="overflow",
        rank="warning",
        result="x: nan",
    ),
    wrong("infinity_is_not_positive", (MASK, "(x > 0) & (x < 1e30)"), fault="overflow"),
    wrong("inverted", (MASK, "torch.le(x, 0)"), fault="constant", result="y"),
    wrong("one_element_differs", (MASK, "(x > 0) ^ (x == x.max())"), fault="constant", result="y"),
]
