"""The root of x - 1, where some x are 1: a little less is NaN."""

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.declare.values import Values

op = Op(
    "corpus_root_above_one",
    inputs={
        "x": Tensor(
            "N D",
            values=Values(
                "1 to 3, and 1 in many places",
                lambda shape, generator: (
                    1
                    + (
                        2.5
                        * torch.rand(shape, generator=generator, device=generator.device).double()
                        - 0.5
                    ).clamp(0)
                ),
                1.0,
            ),
        )
    },
    outputs={"y": "N D"},
    cases=[Case(N=4, D=40)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return (x - 1).sqrt()


@op.provider("written_out")
def candidate(x):
    return (x - 1) ** 0.5


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    wrong(
        "too_large_by_a_thousandth",
        ("(x - 1) ** 0.5", "1.001 * (x - 1) ** 0.5"),
        fault="constant",
        result="y",
    ),
]
