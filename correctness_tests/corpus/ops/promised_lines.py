"""The elements that a mask keeps times a short line of integers, repeated along each row.

The kernel promises its compiler what it knows of its addresses.
"""

import math

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.declare.values import Values, integers


@triton.jit
def multiply_kernel(
    x,
    keep,
    line,
    y,
    D,
    P,
    START: tl.constexpr,
    BYTES: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start = tl.multiple_of(tl.program_id(0) * D, START)
    column = tl.arange(0, BLOCK)
    inside = column < D
    place = tl.max_contiguous(column % P, RUN)
    first = tl.multiple_of(x + start, BYTES)
    value = tl.load(tl.max_contiguous(first + column, BLOCK), mask=inside, other=0.0)
    kept = tl.load(tl.max_contiguous(keep + start + column, BLOCK), mask=inside, other=0)
    factor = tl.load(tl.max_contiguous(line + place, RUN), mask=inside, other=0)
    result = tl.where(kept, value.to(tl.float32) * factor, 0.0)
    tl.store(y + start + column, result, mask=inside)


def fits(dims):
    return None if max(dims.values()) <= 1100 else "more than 1,100 along an axis"


op = Op(
    "corpus_promised_lines",
    inputs={
        "x": Tensor("N D"),
        "keep": Tensor(
            "N D",
            dtype=torch.bool,
            values=Values("coins", lambda shape, g: torch.rand(shape, generator=g) < 0.6),
        ),
        "line": Tensor("P", dtype=torch.int64, values=integers(5)),
    },
    outputs={"y": "N D"},
    cases=[Case(N=4, D=32, P=16), Case(N=3, D=20, P=8)],
    dtypes=(torch.float32, torch.bfloat16),
)


@op.reference
def eager(x, keep, line):
    factor = line.repeat(math.ceil(x.shape[1] / len(line)))[: x.shape[1]]
    return torch.where(keep, (x.double() * factor), 0.0).to(x.dtype)


@op.provider("triton", requires=("triton",), supports=fits)
def candidate(x, keep, line):
    x, keep, line = x.contiguous(), keep.contiguous(), line.contiguous()
    y = torch.empty_like(x)
    (N, D), P = x.shape, len(line)
    if y.numel():
        START = math.gcd(D, 16)
        BYTES = math.gcd(x.data_ptr(), D * x.element_size(), 16)
        RUN = math.gcd(P, 16)
        BLOCK = triton.next_power_of_2(D)
        multiply_kernel[(N,)](
            x, keep, line, y, D, P, START=START, BYTES=BYTES, RUN=RUN, BLOCK=BLOCK
        )
    return y


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # A row begins at a multiple of 16 elements in one case of two.
    wrong("start_not_a_multiple", ("START = math.gcd(D, 16)", "START = 16"), fault="constant"),
    # An address is a multiple of 16 bytes unless the rows, or the tensor, begin elsewhere.
    wrong(
        "address_not_a_multiple",
        ("BYTES = math.gcd(x.data_ptr(), D * x.element_size(), 16)", "BYTES = 16"),
        fault="constant",
    ),
    # Behind the last number of the line the first one follows.
    wrong(
        "places_not_in_a_row",
        (
            "place = tl.max_contiguous(column % P, RUN)",
            "place = tl.max_contiguous(column % P, 2 * RUN)",
        ),
        fault="constant",
    ),
    wrong(
        "addresses_of_integers_not_in_a_row",
        ("tl.max_contiguous(line + place, RUN)", "tl.max_contiguous(line + place, 2 * RUN)"),
        fault="constant",
    ),
    wrong(
        "addresses_of_floats_not_in_a_row",
        (
            "tl.max_contiguous(first + column, BLOCK), mask=inside",
            "tl.max_contiguous(first + column % D, BLOCK), mask=inside",
        ),
        fault="constant",
    ),
]
