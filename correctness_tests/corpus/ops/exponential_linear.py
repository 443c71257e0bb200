"""The exponential linear unit; its gradient in the lower tail is that of a difference from 1."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_exponential_linear",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N D"},
    cases=[Case(N=4, D=64), Case(N=3, D=50)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return torch.nn.functional.elu(x)


@op.provider("by_sign")
def candidate(x):
    return torch.where(x > 0, x, torch.expm1(x.clamp(max=0)))


# variants
from correctness_tests.corpus.variants import right

VARIANTS = [right()]
