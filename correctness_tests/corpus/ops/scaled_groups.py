"""Groups of 64 columns of each row, divided by their largest magnitude."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_scaled_groups",
    inputs={"x": Tensor("N D")},
    outputs={"y": "N D"},
    cases=[Case(N=4, D=64), Case(N=3, D=50)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    scales = [part.abs().amax(1, keepdim=True).expand_as(part) for part in x.split(64, 1)]
    scale = torch.cat(scales, 1)
    return x / torch.where(scale > 0, scale, 1.0)


@op.provider("groups")
def candidate(x):
    y = torch.empty_like(x)
    for start in range(0, x.shape[1], 64):
        part = x[:, start : start + 64]
        scale = part.abs().amax(1, keepdim=True)
        scale = scale.masked_fill(scale == 0, 1.0)
        y[:, start : start + 64] = part / scale
    return y


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # A group of zeros has no scale, unless the whole row is zero.
    wrong(
        "group_of_zeros",
        (
            "scale.masked_fill(scale == 0, 1.0)",
            "scale.masked_fill((x == 0).all(1, keepdim=True), 1.0)",
        ),
        fault="constant",
        result="y",
    ),
]
