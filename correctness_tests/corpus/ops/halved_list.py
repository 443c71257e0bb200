"""Vectors of a list, halved in place."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_halved_list",
    inputs={"several": Tensor("N", mutated=True, many=True)},
    outputs={},
    cases=[Case(N=(5, 3)), Case(N=(4,), why="one vector")],
    dtypes=(torch.float32,),
)


@op.reference
def eager(several):
    for x in several:
        x.mul_(0.5)


@op.provider("written_out")
def candidate(several):
    for x in several:
        x.div_(2)


# variants
from correctness_tests.corpus.variants import right, wrong

LOOP = "    for x in several:\n        x.div_(2)\n"

VARIANTS = [
    right(),
    right(
        "empty_vector_refused",
        (
            LOOP,
            f'    if not all(x.numel() for x in several):\n        raise ValueError("an empty vector")\n{LOOP}',
        ),
    ),
    wrong(
        "ends_at_an_empty_vector",
        (
            LOOP,
            "    for x in several:\n        if not x.numel():\n            return\n        x.div_(2)\n",
        ),
        fault="empty",
        result="several[2]",
    ),
]
