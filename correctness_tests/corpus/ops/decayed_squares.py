"""A running average of squares, with a factor near 1 that a kernel receives in float32."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_decayed_squares",
    inputs={"v": Tensor("N D"), "g": Tensor("N D")},
    outputs={"y": "N D"},
    params={"beta": 0.999},
    cases=[Case(N=5, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(v, g, beta):
    return v * beta + g * g * (1 - beta)


@op.provider("written_out")
def candidate(v, g, beta):
    factor = torch.tensor(beta, dtype=torch.float32, device=v.device)
    return v * factor + g * g * (1 - factor)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    wrong(
        "share_too_large", ("(1 - factor)", "(1 - factor) * 1.00002"), fault="constant", result="y"
    ),
]
