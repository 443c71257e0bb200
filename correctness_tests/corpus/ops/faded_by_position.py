"""Rows that are halved once for each row before them: a single row stays as it is."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_faded_by_position",
    inputs={"x": Tensor("T D", grad=True)},
    outputs={"y": "T D"},
    cases=[Case(T=4, D=8), Case(T=1, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return x * 0.5 ** torch.arange(len(x), dtype=x.dtype, device=x.device)[:, None]


@op.provider("of_powers")
def candidate(x):
    position = torch.arange(len(x), dtype=x.dtype, device=x.device)
    return x * torch.exp2(-position)[:, None]


# variants
from correctness_tests.corpus.variants import right, wrong

RETURN = "    return x * torch.exp2(-position)[:, None]\n"

VARIANTS = [
    right(),
    # Right for one row alone.
    wrong("nothing_faded", (RETURN, "    return x.clone()\n"), fault="constant", result="y"),
]
