"""The sum of each row, one program a row, in Triton."""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor


@triton.jit
def sum_kernel(x, y, D, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    value = tl.load(x + row * D + column, mask=column < D, other=0.0)
    tl.store(y + row, tl.sum(value, 0))


op = Op(
    "corpus_sums_of_rows",
    inputs={"x": Tensor("N D")},
    outputs={"y": "N"},
    cases=[Case(N=5, D=12)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return x.sum(1)


@op.provider("triton", requires=("triton",))
def candidate(x):
    x, y = x.contiguous(), x.new_empty(len(x))
    sum_kernel[(len(x),)](x, y, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return y


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # More warps than another chip has: each launch is compiled for the chip it is chosen for.
    right(
        "warps_by_chip",
        (
            "from tinyllama.harness import Case, Op, Tensor\n",
            "from tinyllama.harness import Case, Op, Tensor\nfrom tinyllama.harness.kernels import chip_of\n",
        ),
        (
            "    sum_kernel[(len(x),)](x, y, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))\n",
            """
    warps = 32 if chip_of(x.device).startswith("sm_") else 8
    block = max(2048, triton.next_power_of_2(x.shape[1]))
    sum_kernel[(len(x),)](x, y, x.shape[1], BLOCK=block, num_warps=warps)
""",
        ),
    ),
    # Triton does not define what a masked-off element is.
    wrong(
        "load_without_other",
        ("mask=column < D, other=0.0)", "mask=column < D)"),
        fault="stale state",
        rank="warning",
        result="y",
    ),
    # A warp has more elements than it has registers.
    wrong(
        "registers_spilled",
        (
            "BLOCK=triton.next_power_of_2(x.shape[1])",
            "BLOCK=max(16384, triton.next_power_of_2(x.shape[1])), num_warps=1",
        ),
        fault="configuration",
        rank="warning",
        result="sum_kernel",
        open="nothing with triton 3.6, where no registers spill",
    ),
    # A program of some chips has at most 16 warps, of 64 threads each.
    wrong(
        "32_warps",
        (
            "BLOCK=triton.next_power_of_2(x.shape[1])",
            "BLOCK=max(2048, triton.next_power_of_2(x.shape[1])), num_warps=32",
        ),
        fault="configuration",
        rank="unsafe",
        result="sum_kernel",
    ),
    # Triton makes a constant of a length of 1, and a constant has no method.
    wrong(
        "method_of_a_length_of_one",
        ("row * D + column, mask", "row * D.to(tl.int64) + column, mask"),
        fault="configuration",
        rank="unsafe",
        result="sum_kernel",
    ),
]
