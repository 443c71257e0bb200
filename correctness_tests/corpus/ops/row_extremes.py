"""The largest and the smallest element of each row and their places; a NaN is both."""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor


@triton.jit
def extremes_kernel(x, highest, lowest, places, N, D, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < D
    value = tl.load(x + row * D + column, mask=mask, other=0.0)
    undefined = tl.where(mask & (value != value), 1, 0)
    largest = tl.max(tl.where(mask, value, -float("inf")), 0)
    smallest = tl.min(tl.where(mask, value, float("inf")), 0)
    place = tl.argmax(tl.where(mask, value, -float("inf")), 0)
    least_place = tl.argmin(tl.where(mask, value, float("inf")), 0)
    some, first = tl.max(undefined, 0) > 0, tl.argmax(undefined, 0)
    tl.store(highest + row, tl.where(some, float("nan"), largest))
    tl.store(lowest + row, tl.where(some, float("nan"), smallest))
    tl.store(places + row, tl.where(some, first, place))
    tl.store(places + N + row, tl.where(some, first, least_place))


op = Op(
    "corpus_row_extremes",
    inputs={"x": Tensor("N D")},
    outputs={
        "highest": "N",
        "lowest": "N",
        "at_highest": Tensor("N", dtype=torch.int64),
        "at_lowest": Tensor("N", dtype=torch.int64),
    },
    cases=[Case(N=4, D=8), Case(N=3, D=11, why="width that is no power of two")],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return x.amax(1), x.amin(1), x.argmax(1), x.argmin(1)


def in_one_block(dims):
    return None if dims["D"] <= 1025 and dims["N"] <= 67 else "use 67 rows, 1,025 columns"


@op.provider("triton", requires=("triton",), supports=in_one_block)
def candidate(x):
    x = x.contiguous()
    N, D = x.shape
    highest, lowest = x.new_empty(N), x.new_empty(N)
    places = torch.empty(2, N, dtype=torch.int64, device=x.device)
    if N:
        BLOCK = triton.next_power_of_2(D)
        extremes_kernel[(N,)](x, highest, lowest, places, N, D, BLOCK=BLOCK)
    at_highest, at_lowest = places.clone()
    return highest, lowest, at_highest, at_lowest


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # The maximum of a kernel leaves NaN out.
    wrong(
        "nan_ignored_by_maximum",
        ('tl.where(some, float("nan"), largest)', "largest"),
        fault="overflow",
        rank="warning",
        result="highest",
    ),
    wrong(
        "nan_ignored_by_place",
        ("tl.where(some, first, place)", "place"),
        fault="overflow",
        rank="warning",
        result="at_highest",
    ),
    # What lies behind a row counts as zero.
    wrong(
        "padded_with_zeros",
        ('tl.max(tl.where(mask, value, -float("inf")), 0)', "tl.max(value, 0)"),
        fault="tail",
        result="highest",
    ),
    # Rows of minus infinity get the least finite number.
    wrong(
        "maximum_from_a_finite_number",
        (
            'largest = tl.max(tl.where(mask, value, -float("inf")), 0)',
            "largest = tl.max(tl.where(mask, value, -3.4e38), 0)\n    largest = tl.maximum(largest, -3.4e38)",
        ),
        fault="overflow",
        result="highest",
    ),
]
