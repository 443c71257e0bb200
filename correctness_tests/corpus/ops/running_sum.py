"""Scaled running sums of rows, or each element plus the sum of its row."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_running_sum",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N D"},
    params={"causal": True, "scale": 0.5},
    cases=[Case(D=16, N=5)],
)


@op.reference
def eager(x, causal, scale):
    y = x.to(torch.promote_types(x.dtype, torch.float32)) * scale
    return (y.cumsum(-1) if causal else y + y.sum(-1, keepdim=True)).to(x.dtype)


@op.provider("fused")
def candidate(x, causal, scale):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if causal:
        return (wide.cumsum(-1) * scale).to(x.dtype)
    y = (wide + wide.sum(-1, keepdim=True)) * scale
    return y.to(x.dtype)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    right(
        "last_columns_in_place",
        ('"causal": True', '"causal": False'),
        (
            "    return y.to(x.dtype)\n",
            """    y[:, 8:] = (wide[:, 8:] + wide.sum(-1, keepdim=True)) * scale
    return y.to(x.dtype)
""",
        ),
    ),
    # Another scale is forgotten where sums are not causal.
    wrong(
        "scale_forgotten_unless_causal",
        ("keepdim=True)) * scale\n", "keepdim=True)) * 0.5\n"),
        fault="constant",
        result="y",
    ),
    # Unless sums are causal, one block of 64 columns is written.
    wrong(
        "one_block_unless_causal",
        (
            "    return y.to(x.dtype)\n",
            "    y = torch.cat([y[:, :64], 0 * y[:, 64:]], -1)\n    return y.to(x.dtype)\n",
        ),
        fault="tail",
        result="y",
    ),
]
