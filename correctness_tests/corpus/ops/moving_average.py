"""A moving average in place, of which the state after two calls is compared."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_moving_average",
    inputs={"average": Tensor("N", mutated=True), "gradient": Tensor("N")},
    outputs={},
    cases=[Case(N=9)],
    calls=2,
    dtypes=(torch.float32,),
)


@op.reference
def eager(average, gradient):
    average.mul_(0.9).add_(0.1 * gradient)


@op.provider("interpolation")
def candidate(average, gradient):
    average.lerp_(gradient, 0.1)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),  # a second call makes a NaN of an infinity
    right(
        "interpolated_to_the_gradient_again",
        (
            "average.lerp_(gradient, 0.1)",
            "average.lerp_(gradient, 0.1)\n    average.lerp_(gradient, 0.0)",
        ),
    ),
    # A single call makes a NaN of an infinity.
    wrong(
        "infinity_less_infinity",
        ("    calls=2,\n", ""),
        (
            "average.lerp_(gradient, 0.1)",
            "average.lerp_(gradient, 0.1)\n    average.lerp_(average.clone(), 0.0)",
        ),
        fault="overflow",
        result="average",
    ),
]
