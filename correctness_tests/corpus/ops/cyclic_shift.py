"""Rows turned by a shift."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_cyclic_shift",
    inputs={"x": Tensor("N D")},
    outputs={"y": "N D"},
    params={"shift": 2},
    cases=[Case(N=4, D=12)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, shift):
    return x.roll(shift, -1)


@op.provider("fused")
def candidate(x, shift):
    D = x.shape[-1]
    source = (torch.arange(D, device=x.device) - shift) % max(D, 1)
    return x[:, source]


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # What is no shift to the right within a row is refused.
    right(
        "other_shifts_refused",
        (
            "    D = x.shape[-1]\n",
            """    if not 0 < shift < 50:
        raise ValueError("shift must be from 1 to 49")
    D = x.shape[-1]
""",
        ),
    ),
    # A shift beyond a row is turned once, and zero beyond that.
    wrong(
        "shift_beyond_a_row",
        (
            "    return x[:, source]\n",
            "    return torch.where(torch.arange(D, device=x.device) - shift < -D, 0.0, x[:, source])\n",
        ),
        fault="constant",
        rank="wrong",
        result="y",
    ),
]
