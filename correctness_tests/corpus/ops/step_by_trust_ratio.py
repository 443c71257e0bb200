"""Parameters less an update, scaled by the ratio of their norms; the ratio is 1 if a norm is 0."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_step_by_trust_ratio",
    inputs={"p": Tensor("N D"), "update": Tensor("N D")},
    outputs={"moved": "N D"},
    cases=[Case(N=4, D=64), Case(N=3, D=50)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(p, update):
    a, b = p.norm(), update.norm()
    return p - torch.where((a > 0) & (b > 0), a / b, 1.0) * update


@op.provider("squares")
def candidate(p, update):
    a, b = p.square().sum().sqrt(), update.square().sum().sqrt()
    ratio = torch.where((a > 0) & (b > 0), a / b, 1.0)
    return p - ratio * update


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # Parameters that are zero never move.
    wrong(
        "parameters_of_zero",
        (
            "ratio = torch.where((a > 0) & (b > 0), a / b, 1.0)",
            "ratio = torch.where(b > 0, a / b, 1.0)",
        ),
        fault="constant",
        result="moved",
    ),
]
