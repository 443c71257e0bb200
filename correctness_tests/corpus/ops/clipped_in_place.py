"""A vector scaled in place so that its norm is at most one."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_clipped_in_place",
    inputs={"vector": Tensor("N", mutated=True)},
    outputs={},
    cases=[Case(N=40)],
    dtypes=(torch.float32, torch.float16),
)


@op.reference
def eager(vector):
    vector.mul_((1 / vector.float().square().sum().sqrt()).clamp(max=1.0).to(vector.dtype))


@op.provider("norm")
def candidate(vector):
    squares = vector.float().square()
    factor = squares.sum().rsqrt().clamp(max=1.0)
    vector.mul_(factor.to(vector.dtype))


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # Squares overflow float16.
    wrong(
        "squares_in_float16",
        ("squares = vector.float().square()", "squares = vector.square().float()"),
        fault="overflow",
        result="vector",
    ),
    wrong(
        "elements_clamped_to_9",
        ("squares = vector.float()", "squares = vector.float().clamp(-9, 9)"),
        fault="overflow",
        result="vector",
    ),
]
