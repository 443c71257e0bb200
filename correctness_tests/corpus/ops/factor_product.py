"""A matrix times a factor, which is 1 in one case."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_factor_product",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N D"},
    params={"factor": 2.0},
    cases=[Case(N=5, D=8), Case(N=4, D=12, params={"factor": 1.0})],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, factor):
    return x * factor


@op.provider("factor_first")
def candidate(x, factor):
    return factor * x


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    wrong(
        "input_returned_for_factor_one",
        ("return factor * x", "return x if factor == 1 else factor * x"),
        fault="aliasing",
        result="y shares memory with x",
    ),
    wrong(
        "sum_in_inference_mode",
        (
            "return factor * x",
            "return x + factor if torch.is_inference_mode_enabled() else factor * x",
        ),
        fault="framework",
        result="y",
    ),
]
