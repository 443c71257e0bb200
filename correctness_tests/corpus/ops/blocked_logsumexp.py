"""The logarithm of the sum of exponentials of each row, one block of columns after the other."""

import math

import torch

from tinyllama.harness import Case, Op, Tensor

BLOCK = 128

op = Op(
    "corpus_blocked_logsumexp",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N"},
    cases=[Case(N=5, D=16)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return x.logsumexp(-1)


@op.provider("in_blocks")
def candidate(x):
    largest, total = torch.full_like(x[:, 0], -math.inf), torch.zeros_like(x[:, 0])
    for block in x.split(BLOCK, -1):
        highest = torch.maximum(largest, block.detach().amax(-1))
        shift = highest.masked_fill(highest == -math.inf, 0.0)
        powers = (block - shift[:, None]).exp().sum(-1)
        total = total * (largest - shift).exp() + powers
        largest = highest
    return shift + total.log()


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # While all blocks so far are -inf, the shift is exp(-inf + inf).
    wrong(
        "shift_by_minus_infinity",
        ("shift = highest.masked_fill(highest == -math.inf, 0.0)", "shift = highest"),
        fault="overflow",
        result="y",
    ),
]
