"""The largest magnitude of each row, for which a maximum leaves NaN out."""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor


@triton.jit
def magnitude_kernel(x, y, n_columns, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < n_columns
    values = tl.load(x + row * stride + columns, mask=inside, other=0.0)
    tl.store(y + row, tl.max(tl.abs(values), 0))


op = Op(
    "corpus_row_magnitude",
    inputs={"x": Tensor("N D")},
    outputs={"y": "N"},
    cases=[Case(N=5, D=50), Case(N=9, D=64, why="a row fills its block")],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return x.abs().amax(-1)


@op.provider("kernel", requires=("triton",))
def candidate(x):
    x = x.contiguous()
    y = x.new_empty(x.shape[0])
    if y.numel():
        block = triton.next_power_of_2(x.shape[1])
        magnitude_kernel[(len(x),)](x, y, x.shape[1], x.stride(0), BLOCK=block)
    return y


# variants
from correctness_tests.corpus.variants import right, wrong

LOAD = "tl.load(x + row * stride + columns, mask=inside, other=0.0)"
GARBAGE = "tl.load(x + row * stride + columns, mask=inside)"
VARIANTS = [
    right(),
    # What the mask leaves out is discarded later.
    right("garbage_discarded", (LOAD, f"tl.where(inside, {GARBAGE}, 0.0)")),
    # Zero and NaN would be right where the mask is false; a large number is not.
    wrong("garbage_compared", (LOAD, GARBAGE), fault="tail", rank="warning", result="garbage"),
]
