"""The naive kernel at offsets past 2^31."""

from tinyllama.harness.declare.offsets import Put, Results, randn
from tinyllama.ops.swiglu import element_kernel, swiglu


@swiglu.rows_apart
def element(put: Put) -> Results:
    """Its gate and up may lie apart."""
    x, weights = randn(3, 8), (randn(5, 8, seed=1), randn(5, 8, seed=2))
    h, gate, up = x.new_empty(3, 5), put(randn(3, 5)), put(randn(3, 5))
    element_kernel[(15,)](x, *weights, h, gate, up, 8, 5, gate.stride(0), BLOCK=8, num_warps=1)
    return [h, gate, up]
