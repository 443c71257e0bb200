"""Softplus, sigmoid and one minus sigmoid of each element."""

import torch
from torch.nn import functional

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_sigmoids",
    inputs={"x": Tensor("N D")},
    outputs={"softplus": "N D", "sigmoid": "N D", "complement": "N D"},
    cases=[Case(N=4, D=64), Case(N=3, D=50)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return functional.softplus(x), x.sigmoid(), (-x).sigmoid()


@op.provider("exponentials")
def candidate(x):
    softplus = x.clamp(min=0) + x.abs().neg().exp().log1p()
    sigmoid = 1 / (1 + (-x).exp())
    complement = 1 / (1 + x.exp())
    return softplus, sigmoid, complement


# variants
from correctness_tests.corpus.variants import right, wrong

SOFTPLUS = "softplus = x.clamp(min=0) + x.abs().neg().exp().log1p()\n"
SIGMOID = "sigmoid = 1 / (1 + (-x).exp())\n"

VARIANTS = [
    right(),
    # An exponential below the rounding of 1 is lost.
    wrong(
        "softplus_of_small_exponentials",
        (SOFTPLUS, "softplus = torch.where(x > 20, x, torch.log(1 + x.clamp(max=20).exp()))\n"),
        fault="accumulation",
        open="not found: digits are lost where the input is 16 times as large as usual",
        rank="warning",
        result="softplus",
    ),
    wrong(
        "sigmoid_as_difference_from_one",
        (SIGMOID, "sigmoid = 1 - 1 / (1 + x.exp())\n"),
        fault="accumulation",
        open="not found: digits are lost where the input is 16 times as large as usual",
        rank="warning",
        result="sigmoid",
    ),
    wrong(
        "complement_as_difference_from_one",
        ("complement = 1 / (1 + x.exp())", "complement = 1 - sigmoid"),
        fault="accumulation",
        open="not found: digits are lost where the input is 16 times as large as usual",
        rank="warning",
        result="complement",
    ),
    wrong(
        "softplus_near_16_by_a_thousandth",
        (SOFTPLUS, SOFTPLUS + "    softplus = softplus + ((x - 16).abs() < 1) * 1e-3\n"),
        fault="constant",
        result="softplus",
    ),
    # The pieces of an approximation leave a gap.
    wrong(
        "sigmoid_in_a_gap_of_its_pieces",
        (SIGMOID, SIGMOID + "    sigmoid = torch.where((x > 6.35) & (x < 6.375), 0.5, sigmoid)\n"),
        fault="constant",
        result="sigmoid",
    ),
]
