"""How many elements of each row are below a number."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_count_below",
    inputs={"x": Tensor("N D")},
    outputs={"count": Tensor("N", dtype=torch.int64)},
    cases=[Case(N=4, D=64), Case(N=3, D=50)],
    params={"high": 6.5},
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, high):
    return (x < high).sum(1)


@op.provider("negated")
def candidate(x, high):
    return (-x > -high).sum(1)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # The bound itself is counted, as in the last bin of a histogram.
    wrong("bound_counted", ("-x > -high", "-x >= -high"), fault="constant", result="count"),
]
