"""A quotient of small whole numbers, which is an infinity of either sign, or NaN, by a zero."""

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.declare.values import Values


def between(low, high):
    def sample(shape, generator):
        return torch.randint(
            low, high + 1, shape, generator=generator, device=generator.device
        ).double()

    return Values(f"{low} to {high}", sample, low)


op = Op(
    "corpus_quotient_of_signs",
    inputs={"x": Tensor("N D", values=between(-2, 2)), "by": Tensor("N D", values=between(0, 3))},
    outputs={"y": "N D"},
    cases=[Case(N=4, D=40), Case(N=3, D=64, why="another width")],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, by):
    return x / by


@op.provider("written_out")
def candidate(x, by):
    y = torch.true_divide(x, by)
    return y


# variants
from correctness_tests.corpus.variants import right, wrong

QUOTIENT = "y = torch.true_divide(x, by)\n"


def then(line):
    return QUOTIENT, f"{QUOTIENT}    {line}\n"


VARIANTS = [
    right(),
    right("by_reciprocal", (QUOTIENT, "y = x * by.reciprocal()\n")),
    wrong(
        "infinity_of_other_sign",
        then('y = y.masked_fill(y == -float("inf"), float("inf"))'),
        fault="overflow",
        result="y",
    ),
    wrong(
        "lowest_number_for_infinity", then("y = y.clamp(min=-3e38)"), fault="overflow", result="y"
    ),
    wrong(
        "nan_for_infinity",
        then('y = y.masked_fill(y == float("inf"), float("nan"))'),
        fault="overflow",
        result="y",
    ),
    wrong(
        "infinity_for_nan",
        then('y = y.masked_fill(y.isnan(), float("inf"))'),
        fault="overflow",
        result="y",
    ),
    wrong("zero_for_nan", then("y = y.masked_fill(y.isnan(), 0.0)"), fault="overflow", result="y"),
    wrong("too_large_by_a_hundredth", then("y = 1.01 * y"), fault="constant", result="y"),
    wrong(
        "infinity_for_two",
        then('y = y.masked_fill(y == 2, float("inf"))'),
        fault="overflow",
        result="y",
    ),
    wrong("all_zero", then("y = torch.zeros_like(y)"), fault="constant", result="y"),
]
