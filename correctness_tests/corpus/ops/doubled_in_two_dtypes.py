"""Twice a tensor, in float32 and bfloat16."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_doubled_in_two_dtypes",
    inputs={"x": Tensor("N D")},
    outputs={"y": "N D"},
    cases=[Case(N=4, D=64), Case(N=3, D=50)],
    dtypes=(torch.float32, torch.bfloat16),
)


@op.reference
def eager(x):
    return x * 2


@op.provider("sum")
def candidate(x):
    return x + x


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # The path for chips without bfloat16 leaves the range of float16.
    wrong(
        "bfloat16_as_float16",
        (
            "    return x + x\n",
            "    if x.dtype is torch.bfloat16:\n        return x.half().to(x.dtype) * 2\n    return x + x\n",
        ),
        fault="overflow",
        result="y",
    ),
]
