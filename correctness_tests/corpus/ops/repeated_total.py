"""The sums of the columns of a matrix, repeated in each row."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_repeated_total",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N D"},
    cases=[Case(N=5, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return x.sum(0).expand(x.shape).clone(memory_format=torch.contiguous_format)


@op.provider("written_out")
def candidate(x):
    total = x.sum(0)
    return total.repeat(len(x), 1)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # All rows of the result are one memory.
    wrong(
        "rows_of_one_memory",
        ("total.repeat(len(x), 1)", "total.expand(x.shape)"),
        fault="aliasing",
        rank="unsafe",
        result="y",
    ),
    # The result is transposed in memory, the reference's is not.
    wrong(
        "result_transposed_in_memory",
        ("total.repeat(len(x), 1)", "total[:, None].repeat(1, len(x)).T"),
        fault="layout",
        rank="warning",
        result="y",
    ),
]
