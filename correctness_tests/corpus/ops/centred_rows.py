"""Rows less their mean, which is summed in float32."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_centred_rows",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N D"},
    cases=[Case(N=5, D=8), Case(N=3, D=200, why="a sum beyond 65,504")],
    dtypes=(torch.float32, torch.float16),
)


@op.reference
def eager(x):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide - wide.mean(-1, keepdim=True)).to(x.dtype)


@op.provider("rows")
def candidate(x):
    total = x.sum(-1, keepdim=True, dtype=torch.float32)
    return (x.float() - total / x.shape[-1]).to(x.dtype)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    wrong("sum_kept_in_float16", (", dtype=torch.float32)", ")"), fault="overflow", result="y"),
]
