"""A matrix times a number, and the same matrix with zeros where a mask is False."""

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.declare.values import Values


def coins(shape, generator):
    return torch.rand(shape, generator=generator) < 0.5


op = Op(
    "corpus_masked_scale",
    inputs={
        "x": Tensor("N D", grad=True),
        "mask": Tensor("N D", dtype=torch.bool, values=Values("coins", coins)),
    },
    outputs={"scaled": "N D", "masked": "N D"},
    params={"scale": 2.5},
    cases=[Case(N=5, D=16)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, mask, scale):
    return x * scale, x.masked_fill(~mask, 0)


@op.provider("two_outputs")
def candidate(x, mask, scale):
    scaled = x * scale
    masked = x.masked_fill(~mask, 0.0)
    return scaled, masked


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # A factor of 1 returns the input itself.
    wrong(
        "factor_of_1_returns_its_input",
        ("    scaled = x * scale\n", "    scaled = x if scale == 1 else x * scale\n"),
        fault="constant",
        rank="unsafe",
        result="scaled shares memory with x",
    ),
    # A factor that is an integer is ignored.
    wrong(
        "whole_number_ignored",
        (
            "    scaled = x * scale\n",
            "    scaled = x * (scale if isinstance(scale, float) else 2.5)\n",
        ),
        fault="constant",
        result="scaled",
    ),
    # A mask that is all True returns the input itself.
    wrong(
        "nothing_to_mask_returns_its_input",
        (
            "    masked = x.masked_fill(~mask, 0.0)\n",
            "    masked = x if mask.all() else x.masked_fill(~mask, 0.0)\n",
        ),
        fault="constant",
        rank="unsafe",
        result="masked shares memory with x",
    ),
]
