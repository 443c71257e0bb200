"""Which rows have an element that is not finite."""

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.values import Values


def _sometimes_infinite(shape, random):
    x = torch.randn(shape, generator=random, dtype=torch.float64, device=random.device)
    return x.masked_fill(x > 1.5, torch.inf)


VALUES = Values("sometimes infinite", _sometimes_infinite)

op = Op(
    "corpus_nonfinite_rows",
    inputs={"x": Tensor("N D", values=VALUES)},
    outputs={"bad": Tensor("N", dtype=torch.bool)},
    cases=[Case(N=6, D=16), Case(N=5, D=21, why="odd")],
    dtypes=(torch.float32, torch.float16),
)


@op.reference
def eager(x):
    return ~x.isfinite().all(-1)


@op.provider("fused")
def candidate(x):
    return (x.isinf() | x.isnan()).any(-1)


# variants
from correctness_tests.corpus.variants import right, wrong

SUM = ("(x.isinf() | x.isnan()).any(-1)", "~x.sum(-1).isfinite()")
VARIANTS = [
    right(),
    # No row of such numbers has a sum that overflows.
    right(
        "sum_of_numbers_of_a_distribution",
        SUM,
        ("import Values", "import Values, normal"),
        ("values=VALUES", "values=normal(2.0)"),
        ("(torch.float32, torch.float16)", "(torch.float16,)"),
    ),
    # The reference refuses numbers whose sum could overflow.
    right(
        "sum_of_numbers_up_to_ten",
        SUM,
        (
            "    return ~x.isfinite().all(-1)",
            """    if (x.isfinite() & (x.abs() > 10)).any():
        raise ValueError("x must be at most 10")
    return ~x.isfinite().all(-1)""",
        ),
    ),
    right("sum_in_float32", SUM, ("(torch.float32, torch.float16)", "(torch.float32,)")),
    # The sum of finite elements overflows in float16.
    wrong("sum_in_float16", SUM, fault="overflow", result="bad"),
]
