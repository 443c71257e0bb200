"""Rows times the cosine of an angle that grows with their position."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_turned_by_position",
    inputs={"x": Tensor("N D")},
    outputs={"y": "N D"},
    cases=[Case(N=5, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return x * torch.arange(x.shape[0]).mul(0.1).to(x.dtype).cos()[:, None]


@op.provider("outer")
def candidate(x):
    positions = torch.arange(x.shape[0], device=x.device, dtype=torch.float32)[:, None]
    angles = positions * 0.1
    return x * angles.cos()


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # Under autocast the positions of the product are of bfloat16, which has no 257.
    wrong(
        "angles_by_a_product_under_autocast",
        ("angles = positions * 0.1", "angles = positions @ positions.new_full((1, 1), 0.1)"),
        fault="framework",
        result="y",
    ),
]
