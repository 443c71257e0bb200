"""Twice a vector, by one Triton program: loads beyond a buffer, and more threads than a chip has."""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor


@triton.jit
def scaled_copy_kernel(x, y, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < n
    value = tl.load(x + at, mask=inside)
    tl.store(y + at, 2 * value, mask=inside)


op = Op(
    "corpus_scaled_copy",
    inputs={"x": Tensor("N")},
    outputs={"y": "N"},
    cases=[Case(N=50)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return 2 * x


@op.independent("a sum")
def added(x):
    return x + x


@op.provider("triton", requires=("triton",))
def candidate(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    if len(x):
        BLOCK = triton.next_power_of_2(len(x))
        scaled_copy_kernel[(1,)](x, y, len(x), BLOCK=BLOCK, num_warps=4)
    return y


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # What the last threads read is not used.
    wrong(
        "read_beyond_the_end",
        ("tl.load(x + at, mask=inside)", "tl.load(x + at)"),
        fault="out of bounds",
        rank="unsafe",
        result="end of x",
    ),
    # 32 waves of 64 threads are more than a program may have on some chips.
    wrong(
        "more_threads_than_a_chip_has",
        ("num_warps=4", "num_warps=32"),
        fault="configuration",
        rank="unsafe",
        result="threads",
    ),
]
