"""The activation's kernels at offsets past 2^31."""

from __future__ import annotations

from tinyllama.harness.declare.offsets import Put, Results, randn, unwritten
from tinyllama.ops.silu_mul import activate, activate_backward, silu_mul


@silu_mul.rows_apart
def activation(put: Put) -> Results:
    dh, gate, up = (put(randn(3, 40, seed=seed)) for seed in range(3))
    results = [put(unwritten(3, 40)) for _ in range(3)]
    activate_backward(dh, gate, up, *results)
    return [activate(gate, up), *results]
