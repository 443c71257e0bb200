"""The naive kernel at offsets past 2^31."""

import torch

from tinyllama.harness.declare.offsets import Ends, Pairs, Put, Results, randn
from tinyllama.ops.swiglu import element_kernel, swiglu


@swiglu.rows_apart
def element(put: Put) -> Results:
    """Its gate and up may lie apart."""
    x, weights = randn(3, 8), (randn(5, 8, seed=1), randn(5, 8, seed=2))
    h, gate, up = x.new_empty(3, 5), put(randn(3, 5)), put(randn(3, 5))
    element_kernel[(15,)](x, *weights, h, gate, up, 8, 5, gate.stride(0), BLOCK=8, num_warps=1)
    return [h, gate, up]


@swiglu.many_programs
def many_rows(ends: Ends) -> Pairs:
    """Of one column, since each element has its program."""
    width = 2**14
    rows = 2**31 // width + 2
    weights = randn(1, width, seed=1), randn(1, width, seed=2)

    def call(x: torch.Tensor) -> Results:
        h, gate, up = (x.new_empty(len(x), 1) for _ in range(3))
        element_kernel[(len(x),)](x, *weights, h, gate, up, width, 1, 1, BLOCK=width)
        return [h, gate, up]

    return ends(call, 1, ends.room(rows * width).view(rows, width))
