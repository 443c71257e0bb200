"""The elements of a matrix rounded to dtypes of few bits: float8, uint16 and int8."""

import torch

from tinyllama.harness import Case, Op, Tensor

FLOAT8 = torch.float8_e4m3fn

op = Op(
    "corpus_narrow_dtypes",
    inputs={"x": Tensor("N D")},
    outputs={
        "same": "N D",
        "float8": Tensor("N D", dtype=FLOAT8),
        "tenths": Tensor("N D", dtype=torch.uint16),
        "whole": Tensor("N D", dtype=torch.int8),
    },
    cases=[Case(N=5, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return (
        x,
        x.to(x.dtype if x.dtype is torch.float64 else FLOAT8),
        (x.abs() * 10).clamp(0, 1000).to(torch.uint16),
        x.clamp(-9, 9).to(torch.int8),
    )


@op.provider("written_out")
def candidate(x):
    y = x.to(FLOAT8)
    z = (10 * x.abs()).clamp(0, 1000).to(torch.uint16)
    w = torch.clamp(x, -9, 9).to(torch.int8)
    return x.clone(), y, z, w


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # What a NaN is quantised to is a convention.
    right(
        "nan_quantised_to_three", ("torch.clamp(x, -9, 9)", "torch.clamp(x.nan_to_num(3.0), -9, 9)")
    ),
    wrong(
        "float8_all_zero",
        ("y = x.to(FLOAT8)", "y = torch.zeros_like(x, dtype=FLOAT8)"),
        fault="constant",
        result="float8",
    ),
    wrong(
        "uint16_all_zero",
        ("z = (10 * x.abs())", "z = (0 * x.abs())"),
        fault="constant",
        result="tenths",
    ),
    wrong(
        "int8_all_zero",
        ("w = torch.clamp(x, -9, 9)", "w = torch.clamp(x, 0, 0)"),
        fault="constant",
        result="whole",
    ),
]
