"""A product with a constant in float16, in which some results are beyond the largest number."""

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.values import normal

op = Op(
    "corpus_scaled_half",
    inputs={"x": Tensor("N D", values=normal(1500.0))},
    outputs={"y": "N D"},
    cases=[Case(N=4, D=40)],
    dtypes=(torch.float16,),
)


@op.reference
def eager(x):
    return x * 32


@op.provider("written_out")
def candidate(x):
    y = 32 * x
    return y


# variants
from correctness_tests.corpus.variants import right, wrong

PRODUCT = "y = 32 * x\n"

VARIANTS = [
    right(),
    # The result in float64 is finite: so is the largest number of float16.
    right(
        "saturated",
        (PRODUCT, "y = (32 * x.float()).clamp(-65504, 65504).half()\n"),
        open="accused by sizes, which takes infinity alone for right beyond 2^24 elements",
    ),
    wrong(
        "infinity_of_other_sign",
        (PRODUCT, f"{PRODUCT}    y = torch.where(y.isinf(), -y, y)\n"),
        fault="overflow",
        result="y",
    ),
    wrong(
        "nan_for_infinity",
        (PRODUCT, f"{PRODUCT}    y = y + (y - y)\n"),
        fault="overflow",
        result="y",
    ),
    wrong(
        "too_large_by_a_twentieth", (PRODUCT, "y = 1.05 * 32 * x\n"), fault="constant", result="y"
    ),
]
