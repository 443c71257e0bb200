"""The rows of a matrix divided by the root of their mean square; a row of one entry becomes 1."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_narrow_norm",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N D"},
    cases=[Case(N=3, D=1), Case(N=5, D=16)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


@op.provider("in_float32")
def candidate(x):
    wide = x.float()
    factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    return (wide * factor).to(x.dtype)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    # Its second derivative is asked in float64, too, where a width of 1 lets all of it cancel.
    right(),
    wrong(
        "gradient_of_the_factor_lost",
        ("torch.rsqrt(wide.square()", "torch.rsqrt(wide.detach().square()"),
        fault="gradient missing",
        result="grad x",
    ),
]
