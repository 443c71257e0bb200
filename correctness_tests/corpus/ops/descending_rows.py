"""Rows in descending order and the places of their elements, by ranks, one program a row, in Triton.

After FlagOpen/FlagGems issue 503.
"""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor


@triton.jit
def sort_kernel(x, values, places, D, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < D
    value = tl.load(x + row * D + column, mask=inside, other=-float("inf"))
    larger = (value[None, :] > value[:, None]) | (
        (value != value)[None, :] & (value == value)[:, None]
    )
    smaller = (value[None, :] < value[:, None]) | (
        (value == value)[None, :] & (value != value)[:, None]
    )
    first = ~larger & ~smaller & (column[None, :] < column[:, None])
    rank = tl.sum(((larger | first) & inside[None, :]).to(tl.int32), 1)
    here = (rank[None, :] == column[:, None]) & inside[None, :]
    ranked = tl.sum(tl.where(here, value[None, :], 0.0), 1)
    place = tl.sum(tl.where(here, column[None, :], 0), 1)
    tl.store(values + row * D + column, ranked, mask=inside)
    tl.store(places + row * D + column, place.to(tl.int64), mask=inside)


op = Op(
    "corpus_descending_rows",
    inputs={"x": Tensor("N D")},
    outputs={"values": "N D", "places": Tensor("N D", dtype=torch.int64)},
    cases=[Case(N=3, D=8), Case(N=2, D=6, why="part of a block")],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    values, places = torch.sort(x, dim=-1, descending=True, stable=True)
    return values, places


@op.provider("triton", requires=("triton",))
def candidate(x):
    x = x.contiguous()
    values = torch.empty_like(x)
    places = torch.empty(x.shape, dtype=torch.int64, device=x.device)
    if x.numel():
        D = x.shape[1]
        sort_kernel[(len(x),)](x, values, places, D, BLOCK=triton.next_power_of_2(D))
    return values, places


# variants
from correctness_tests.corpus.variants import right, wrong

LIMITED = (
    'requires=("triton",))',
    'requires=("triton",), supports=lambda dims: "D > 1024" if dims["D"] > 1024 else None)',
)
# A matrix of zeros and ones times an infinity has NaN where it should have zero.
PRODUCT = (
    ("tl.where(here, value[None, :], 0.0), 1)", "here.to(tl.float32) * value[None, :], 1)"),
    ('mask=inside, other=-float("inf"))', "mask=inside, other=-3.0e38)"),
)

VARIANTS = [
    right(open="special values: Triton's limit on the elements of a tensor, at 2,048 columns"),
    right("at_most_1024_columns", LIMITED),
    wrong(
        "chosen_by_a_product_with_zero",
        *PRODUCT,
        fault="overflow",
        result="values",
        open="special values: a tensor of too many elements, as of the right kernel: no infinity is tried",
    ),
    wrong(
        "chosen_by_a_product_with_zero_of_at_most_1024_columns",
        LIMITED,
        *PRODUCT,
        fault="overflow",
        result="values",
    ),
]
