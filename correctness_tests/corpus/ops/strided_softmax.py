"""Softmax of rows, which are found in memory by a stride."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_strided_softmax",
    inputs={"x": Tensor("N D")},
    outputs={"y": "N D"},
    cases=[Case(N=4, D=12)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return x.softmax(-1)


@op.provider("fused")
def candidate(x):
    if not x.numel() or not x.is_contiguous():
        return x.softmax(-1)
    width = x.shape[1]
    rows = x.as_strided((x.numel() // width, width), (width, 1))
    return rows.softmax(-1).view(x.shape)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # The stride of the only row of a contiguous tensor may be any number.
    wrong(
        "width_from_the_stride_of_a_row",
        ("width = x.shape[1]", "width = x.stride(0)"),
        fault="layout",
    ),
]
