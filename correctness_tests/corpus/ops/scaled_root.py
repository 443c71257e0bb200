"""The root of x - 1, times a number: x has a domain, so it may not have any value."""

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.declare.values import uniform

op = Op(
    "corpus_scaled_root",
    inputs={"x": Tensor("N D", values=uniform(1.0, 2.0))},
    outputs={"y": "N D"},
    params={"by": 2.0},
    cases=[Case(N=5, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, by):
    return by * (x - 1).sqrt()


@op.provider("power")
def candidate(x, by):
    y = (x - 1) ** 0.5
    return y * by


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    right(
        "without_parameter",
        ('    params={"by": 2.0},\n', ""),
        ("def eager(x, by):\n    return by * ", "def eager(x):\n    return "),
        ("def candidate(x, by):", "def candidate(x):"),
        ("return y * by", "return y"),
    ),
    wrong("factor_always_two", ("return y * by", "return y * 2"), fault="constant", result="y"),
]
