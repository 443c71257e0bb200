"""Logsumexp of the elements of a row that a mask leaves, which is -inf where it leaves none, and
whether it leaves some."""

import math

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.values import integers

op = Op(
    "corpus_logsumexp_with_mask",
    inputs={
        "x": Tensor("N D", grad=True),
        "mask": Tensor("N D", dtype=torch.bool, values=integers(2)),
    },
    outputs={"y": "N", "some": Tensor("N", dtype=torch.bool)},
    cases=[Case(N=24, D=3), Case(N=4, D=40, why="rows of which something is left")],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, mask):
    y = x.masked_fill(~mask, -math.inf).logsumexp(-1)
    return y, mask.any(-1)


@op.independent("by the sum of those that are left")
def of_those_that_are_left(x, mask):
    scores = torch.where(mask, x, -math.inf)
    return scores.logsumexp(-1), mask.sum(-1) > 0


@op.provider("written_out")
def candidate(x, mask):
    z = torch.logsumexp(torch.where(mask, x, -math.inf), -1)
    return z, mask.any(-1)


# variants
from correctness_tests.corpus.variants import right, wrong

EAGER = "y = x.masked_fill(~mask, -math.inf).logsumexp(-1)\n"
CANDIDATE = "z = torch.logsumexp(torch.where(mask, x, -math.inf), -1)\n"


def shifted(name):
    """The difference of two infinities is NaN in a row of which nothing is left."""
    return f"""scores = x.masked_fill(~mask, -math.inf)
    largest = scores.amax(-1, keepdim=True).detach()
    {name} = (scores - largest).exp().sum(-1).log() + largest[:, 0]
"""


VARIANTS = [
    right(),
    right("reference", eager=True),
    wrong("nan_for_an_empty_row", (CANDIDATE, shifted("z")), fault="empty", result="y"),
    wrong(
        "infinity_of_other_sign",
        (CANDIDATE, "z = -torch.logsumexp(torch.where(mask, -x, -math.inf), -1)\n"),
        fault="empty",
        result="y",
    ),
    wrong(
        "finite_for_an_empty_row",
        (CANDIDATE, f"{CANDIDATE}    z = z.clamp(min=-1e30)\n"),
        fault="empty",
        result="y",
    ),
    wrong(
        "reference_nan_for_an_empty_row",
        (EAGER, shifted("y")),
        fault="accumulation",
        result="y",
        eager=True,
    ),
    wrong(
        "reference_flag_inverted",
        ("return y, mask.any(-1)", "return y, ~mask.any(-1)"),
        fault="constant",
        result="some",
        eager=True,
    ),
]
