"""Sums of the elements of rows that a mask keeps: those of the first 64 columns, and of the rest."""

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.values import Values

COINS = Values("coins", lambda shape, random: torch.rand(shape, generator=random) < 0.5)

op = Op(
    "corpus_masked_row_sum",
    inputs={"x": Tensor("N D", grad=True), "keep": Tensor("N D", dtype=torch.bool, values=COINS)},
    outputs={"y": "N"},
    cases=[Case(N=4, D=12)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, keep):
    return (x * keep).sum(-1)


@op.provider("fused")
def candidate(x, keep):
    x = x * keep
    head, rest = x[:, :64].sum(-1), x[:, 64:].sum(-1)
    return head + rest


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # A first row that keeps all elements decides for each row.
    wrong(
        "first_row_decides_for_all",
        ("    x = x * keep\n", "    x = torch.where(keep[:1].all(), x, x * keep)\n"),
        fault="constant",
        result="y",
    ),
    # The mean of the first 64 columns is 0/0 where none of them is kept.
    wrong(
        "mean_of_a_block_without_elements",
        (
            "    return head + rest\n",
            """    if x.shape[1] <= 64:
        return head
    count, others = keep[:, :64].sum(-1), keep[:, 64:].sum(-1)
    mean = head / count
    mean = mean + (rest - others * mean) / (count + others)
    return mean * (count + others)
""",
        ),
        fault="overflow",
        result="y",
    ),
]
