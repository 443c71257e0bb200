"""The exponential of a matrix, also of wide inputs, where a library's own function may be off."""

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.declare.values import normal

op = Op(
    "corpus_wide_exponential",
    inputs={"x": Tensor("N D")},
    outputs={"y": "N D"},
    dtypes=(torch.float32,),
    cases=[Case(N=40, D=16)],
    extremes={"wide": {"x": normal(20.0)}, "narrow": {"x": normal(0.1)}},
)


@op.reference
def eager(x):
    return x.double().exp().to(x.dtype)


@op.provider("torch")
def stock(x):
    return torch.exp(x)


@op.provider("plain")
def candidate(x):
    return x.exp()


# variants
from correctness_tests.corpus.variants import right, wrong


def off(line, result, factor):
    return line, f"    return torch.where(x.abs() > 10, {result} * {factor}, {result})\n"


def stock_off(factor):
    return off("    return torch.exp(x)\n", "torch.exp(x)", factor)


def candidate_off(factor):
    return off("    return x.exp()\n", "x.exp()", factor)


VARIANTS = [
    right(),
    right("as_far_off_as_torch", candidate_off("1.0001"), stock_off("1.0001")),
    right("right_where_torch_is_off", stock_off("1.0001")),
    wrong("off_for_wide_inputs", candidate_off("1.0001"), fault="overflow", result="y: "),
    wrong(
        "off_for_wide_inputs_without_torch",
        candidate_off("1.0001"),
        ('@op.provider("torch")\ndef stock(x):\n    return torch.exp(x)\n\n\n', ""),
        fault="overflow",
        result="y: ",
    ),
    wrong(
        "much_further_off_than_torch",
        candidate_off("1.1"),
        stock_off("1.0001"),
        fault="overflow",
        result="y: ",
    ),
    wrong(
        "nan_where_torch_is_off",
        candidate_off('float("nan")'),
        stock_off("1.0001"),
        fault="overflow",
        result="y: ",
    ),
]
