"""A step of gradient descent on a list of parameters, in place."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_descent_step",
    inputs={"p": Tensor("P", mutated=True, many=True), "g": Tensor("P", many=True)},
    outputs={},
    params={"rate": 0.1},
    cases=[Case(P=(5, 1, 3))],
    dtypes=(torch.float32,),
)


@op.reference
def eager(p, g, rate):
    for parameter, gradient in zip(p, g, strict=True):
        parameter.add_(gradient, alpha=-rate)


@op.provider("all_at_once")
def candidate(p, g, rate):
    parameters, gradients = p, g
    torch._foreach_add_(parameters, gradients, alpha=-rate)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # A table of 32 addresses leaves out what a longer list has behind them.
    wrong(
        "first_32_parameters",
        ("parameters, gradients = p, g", "parameters, gradients = p[:32], g[:32]"),
        fault="tail",
    ),
]
