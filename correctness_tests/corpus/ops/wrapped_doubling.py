"""Twice a vector, by a kernel that is launched through ``torch.library.wrap_triton``, PyTorch's way
for kernels under torch.compile.

After the rotary embedding of flash-attn 2.8.3.
"""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor


@triton.jit
def double_kernel(x, y, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < N, other=0.0)
    tl.store(y + at, value * 2, mask=at < N)


op = Op(
    "corpus_wrapped_doubling",
    inputs={"x": Tensor("N")},
    outputs={"y": "N"},
    cases=[Case(N=64), Case(N=37, why="part of a block")],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return x * 2


@op.provider("triton", requires=("triton",))
def candidate(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    if N := len(x):
        torch.library.wrap_triton(double_kernel)[(triton.cdiv(N, 32),)](x, y, N, BLOCK=32)
    return y


# variants
from correctness_tests.corpus.variants import right, wrong

STORE = "    tl.store(y + at, value * 2, mask=at < N)\n"
UNMASKED = "    tl.store(y + at, value * 2)\n"

VARIANTS = [
    right(),
    wrong("stored_without_mask", (STORE, UNMASKED), fault="out of bounds", rank="unsafe"),
    wrong(
        "more_threads_than_a_chip_has",
        ("BLOCK=32)", "BLOCK=32, num_warps=32)"),
        fault="configuration",
        rank="unsafe",
    ),
]
