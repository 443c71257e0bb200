"""A step of an optimizer in place: by the average gradient and its sign, over a root of squares."""

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.declare.values import normal, uniform

op = Op(
    "corpus_momentum_step",
    inputs={
        "parameter": Tensor("N D", mutated=True),
        "gradient": Tensor("N D"),
        "average": Tensor("N D", mutated=True, values=normal(0.1)),
        "squares": Tensor("N D", mutated=True, values=uniform(0.0, 1.0)),
    },
    outputs={},
    cases=[Case(N=5, D=8), Case(N=3, D=4)],
    params={"step": 3},
    dtypes=(torch.float32,),
)


@op.reference
def eager(parameter, gradient, average, squares, step):
    average.mul_(0.9).add_(gradient, alpha=0.1)
    squares.mul_(0.99).addcmul_(gradient, gradient, value=0.01)
    parameter.sub_(1e-3 * (average + average.sign()) / ((squares.sqrt() + 1e-8) * (1 - 0.9**step)))


@op.provider("in_place")
def candidate(parameter, gradient, average, squares, step):
    correction = 1 - 0.9**step
    average.add_(0.1 * (gradient - average))
    squares.add_(0.01 * (gradient * gradient - squares))
    direction = average + average.sign()
    root = squares.sqrt() + 1e-8
    change = direction.div(root).mul_(1e-3 / correction)
    parameter.sub_(change)


# variants
from correctness_tests.corpus.variants import right, wrong

IN_A_COPY = "parameter.contiguous().view(-1).sub_(change.reshape(-1))"

VARIANTS = [
    right(),
    # A parameter that had no gradient yet takes a step.
    wrong(
        "sign_of_zero",
        (
            "average + average.sign()\n    root",
            "average + torch.where(average > 0, 1.0, -1.0)\n    root",
        ),
        fault="constant",
        result="parameter",
    ),
    wrong(
        "epsilon_under_the_root",
        ("root = squares.sqrt() + 1e-8", "root = (squares + 1e-8).sqrt()"),
        fault="constant",
        result="parameter",
    ),
    # The correction is computed once, of the first step that comes.
    wrong(
        "correction_of_the_first_step",
        ("\n\n@op.reference", "\nCORRECTIONS = {}\n\n\n@op.reference"),
        (
            "correction = 1 - 0.9**step",
            'correction = CORRECTIONS.setdefault("bias", 1 - 0.9**step)',
        ),
        fault="constant",
        result="parameter",
    ),
    # The parameters do not change unless they are dense.
    wrong(
        "parameters_changed_in_a_dense_copy",
        ("parameter.sub_(change)", IN_A_COPY),
        fault="layout",
        result="parameter",
    ),
    # The layout of the gradient decides how the parameters are read.
    wrong(
        "layout_of_the_gradient_taken_for_all",
        (
            "    parameter.sub_(change)",
            f"    if gradient.is_contiguous():\n        {IN_A_COPY}\n    else:\n        parameter.sub_(change)",
        ),
        fault="layout",
        result="parameter",
    ),
]
