"""Rows divided by their largest absolute value."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_rows_by_largest",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N D"},
    cases=[Case(N=5, D=16)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return x / x.abs().amax(-1, keepdim=True).clamp_min(1e-30)


@op.provider("fused")
def candidate(x):
    largest = torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True))
    return x / largest.clamp_min(1e-30)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # A row with an infinity gives NaN and zeros, as the reference does.
    right(
        "by_the_mean_square",
        ("x / x.abs().amax(-1, keepdim=True).clamp_min(1e-30)", "x / x.square().mean(-1)[:, None]"),
        (
            """largest = torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True))
    return x / largest.clamp_min(1e-30)""",
            "return x / x.square().mean(-1, keepdim=True)",
        ),
    ),
    # The guard against zero is larger than elements that float32 has.
    wrong(
        "guard_of_1e_12",
        ("return x / largest.clamp_min(1e-30)", "return x / largest.clamp_min(1e-12)"),
        fault="constant",
        result="y",
    ),
]
