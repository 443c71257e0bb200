"""The rounding of an operand at offsets past 2^31."""

import torch

from tinyllama.harness.declare.offsets import Ends, Pairs, Results
from tinyllama.ops.linear import linear
from tinyllama.ops.linear.rounding_kernels import round_kernel

BLOCK = 2**17  # elements of a program: each one that is left out costs a moment, too


@linear.many_programs
def many_elements(ends: Ends) -> Pairs:
    def call(x: torch.Tensor) -> Results:
        round_kernel[(-(-x.numel() // BLOCK),)](x, x.numel(), BLOCK=BLOCK)
        return [x]

    return ends(call, 1, ends.room(2**32 + 4).view(torch.float32))
