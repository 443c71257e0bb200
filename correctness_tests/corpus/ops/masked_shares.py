"""The elements of each row that a mask keeps, divided by their number, times 1 + the row's class."""

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.declare.values import Values, integers


def coins(shape, generator):
    return torch.rand(shape, generator=generator) < 0.6


op = Op(
    "corpus_masked_shares",
    inputs={
        "x": Tensor("N D", grad=True),
        "keep": Tensor("N D", dtype=torch.bool, values=Values("coins", coins)),
        "label": Tensor("N", dtype=torch.int64, values=integers(5)),
    },
    outputs={"y": "N D"},
    cases=[Case(N=6, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, keep, label):
    count = keep.sum(-1, keepdim=True).clamp(min=1)
    return x * keep / count * (1 + label[:, None])


@op.provider("written_out")
def candidate(x, keep, label):
    count = keep.sum(-1, keepdim=True).clamp(min=1)
    y = (1 + label)[:, None] * (x * keep / count)
    return y


# variants
from correctness_tests.corpus.variants import right, wrong

COUNT = "    count = keep.sum(-1, keepdim=True).clamp(min=1)\n    y = "

VARIANTS = [
    right(),
    # A row that keeps nothing is 0 / 0.
    wrong(
        "no_element_kept",
        (COUNT, COUNT.replace(".clamp(min=1)", "")),
        fault="empty",
        result="y",
    ),
    # The quotient of two integers has the default dtype, which may be bfloat16.
    wrong(
        "integers_divided_by_integers",
        ("(1 + label)[:, None] * (x * keep / count)", "(1 + label)[:, None] / count * (x * keep)"),
        fault="stale state",
        result="y",
    ),
    # Labels that are all 0 are taken for no labels.
    wrong(
        "all_labels_zero",
        ("    return y\n", "    return y if (label > 0).any() else y * 0\n"),
        fault="constant",
        result="y",
    ),
]
