"""Three matrices: x plus a number each, so that each parameter changes one result alone."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_three_offsets",
    inputs={"x": Tensor("N D")},
    outputs={"first": "N D", "middle": "N D", "last": "N D"},
    params={"a": 1.0, "b": 2.0, "c": 3.0},
    cases=[Case(N=5, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, a, b, c):
    return x + a, x + b, x + c


@op.provider("three")
def candidate(x, a, b, c):
    first = torch.add(x, a)
    middle = torch.add(x, b)
    last = torch.add(x, c)
    return first, middle, last


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    wrong(
        "number_of_first_always_one",
        ("torch.add(x, a)", "torch.add(x, 1.0)"),
        fault="constant",
        result="first",
    ),
    wrong(
        "number_of_middle_always_two",
        ("torch.add(x, b)", "torch.add(x, 2.0)"),
        fault="constant",
        result="middle",
    ),
    wrong(
        "number_of_last_always_three",
        ("torch.add(x, c)", "torch.add(x, 3.0)"),
        fault="constant",
        result="last",
    ),
]
