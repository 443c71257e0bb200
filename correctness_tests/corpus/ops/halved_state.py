"""A state of 8 bits, halved in place."""

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.declare.values import normal

op = Op(
    "corpus_halved_state",
    inputs={"state": Tensor("N", mutated=True, dtype=torch.float8_e5m2, values=normal())},
    outputs={},
    cases=[Case(N=9)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(state):
    state.copy_((state.float() / 2).to(state.dtype))


@op.provider("rescaled")
def candidate(state):
    wide = state.float()
    scale = wide.abs().amax()
    scale = torch.where(scale > 0, scale, 1.0)
    state.copy_((wide / scale * (scale / 2)).to(state.dtype))


# variants
from correctness_tests.corpus.variants import right

VARIANTS = [
    right(),
]
