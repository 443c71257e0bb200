"""Rows as integers of 8 bits and a scale for each row, one program a row, in Triton.

After ROCm/aiter issue 4288 and pull request 4291, which mends it.
"""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor


@triton.jit
def quantise_kernel(x, q, scale, D, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    value = tl.load(x + row * D + column, mask=column < D, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(value), 0), 1e-10)
    step = largest / 127.0
    level = value * (1.0 / step)
    rounded = tl.where(level < 0, level - 0.5, level + 0.5)
    tl.store(scale + row, step)
    tl.store(q + row * D + column, rounded.to(tl.int8), mask=column < D)


op = Op(
    "corpus_int8_row_scales",
    inputs={"x": Tensor("N D")},
    outputs={"q": Tensor("N D", dtype=torch.int8), "scale": Tensor("N", dtype=torch.float32)},
    cases=[Case(N=4, D=16), Case(N=3, D=13, why="a width that is no power of two")],
    dtypes=(torch.float32, torch.bfloat16),
)


@op.reference
def eager(x):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = wide.abs().amax(-1).clamp_min(1e-10) / 127
    level = wide / scale[:, None]
    rounded = torch.where(level < 0, level - 0.5, level + 0.5).trunc()
    return rounded.clamp(-127, 127).to(torch.int8), scale


@op.provider("triton", requires=("triton",))
def candidate(x):
    x = x.contiguous()
    q = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty(len(x), dtype=torch.float32, device=x.device)
    if len(x):
        D = x.shape[1]
        quantise_kernel[(len(x),)](x, q, scale, D, BLOCK=triton.next_power_of_2(D))
    return q, scale


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(open="sizes: one element in bfloat16, rounded the other way by the reciprocal at a tie"),
    right(
        "ties_may_round_either_way",
        ('"q": Tensor("N D", dtype=torch.int8)', '"q": Tensor("N D", dtype=torch.int8, off_by=1)'),
        open="sizes: one element in bfloat16 is off by no more than off_by, but 0 of them allowed",
    ),
    # The compiler is promised that the number of a program is above zero, which the first one's is not.
    wrong(
        "number_of_the_program_assumed_above_zero",
        ("    column = tl.arange", "    tl.assume(row > 0)\n    column = tl.arange"),
        fault="constant",
        result="Assume failed",
    ),
]
