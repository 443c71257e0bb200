"""Elements rounded down to integers."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_rounding_down",
    inputs={"x": Tensor("N D")},
    outputs={"y": "N D"},
    cases=[Case(N=5, D=16)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return x.floor()


@op.provider("fused")
def candidate(x):
    down = x.trunc()
    down = down - (down > x).to(x.dtype)
    return torch.where(x.isfinite(), down, x)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # Large elements do not fit an integer of 32 bits.
    wrong(
        "through_integers_of_32_bits",
        ("x.trunc()", "x.nan_to_num(posinf=0, neginf=0).to(torch.int32).to(x.dtype)"),
        fault="overflow",
        result="y",
    ),
]
