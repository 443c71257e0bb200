"""What a BLAS or a kernel of another op wrote, rounded to tf32 for kernels that cut operands."""

import torch

from tinyllama.harness.kernels import cdiv, jit, tl
from tinyllama.harness.kernels.precision import input_precision
from tinyllama.harness.kernels.tf32 import to_tf32

BLOCK = 1024


@jit
def round_kernel(x, size, BLOCK: tl.constexpr):
    """x, rounded in place, as `to_tf32` does."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, to_tf32(tl.load(x + at, mask=at < size)), mask=at < size)


def round_operand(x: torch.Tensor) -> torch.Tensor:
    """x, dense, rounded in place where products of its kind are in tf32; else it stays. -> x.

    A vendor's BLAS rounds its own operands; kernels of ours read them as they are."""
    if input_precision(x) == "tf32" and x.numel():
        round_kernel[(cdiv(x.numel(), BLOCK),)](x, x.numel(), BLOCK=BLOCK, num_warps=4)
    return x
