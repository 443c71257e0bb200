"""Numbers added to a long vector at indices, of which few draws have two that are equal."""

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.values import integers

op = Op(
    "corpus_added_at_index",
    inputs={
        "base": Tensor("M"),
        "x": Tensor("N"),
        "index": Tensor("N", dtype=torch.int64, values=lambda sizes: integers(sizes["M"])),
    },
    outputs={"y": "M"},
    cases=[Case(M=5000, N=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(base, x, index):
    return base.index_add(0, index, x)


@op.provider("written_out")
def candidate(base, x, index):
    return base.index_put((index,), x, accumulate=True)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    wrong(
        "last_of_equal_indices_alone",
        (
            "base.index_put((index,), x, accumulate=True)",
            "base.index_put((index,), base[index] + x)",
        ),
        fault="accumulation",
        result="y",
    ),
]
