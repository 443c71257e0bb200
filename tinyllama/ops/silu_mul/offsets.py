"""The activation's kernels at offsets past 2^31."""

from __future__ import annotations

from tinyllama.harness.declare.offsets import Ends, Pairs, Put, Results, randn, unwritten
from tinyllama.harness.kernels.configs import Config
from tinyllama.ops.silu_mul import ACTIVATE, activate, activate_backward, silu_mul


@silu_mul.rows_apart
def activation(put: Put) -> Results:
    dh, gate, up = (put(randn(3, 40, seed=seed)) for seed in range(3))
    results = [put(unwritten(3, 40)) for _ in range(3)]
    activate_backward(dh, gate, up, *results)
    return [activate(gate, up), *results]


@silu_mul.many_programs
def many_rows(ends: Ends) -> Pairs:
    """The result is dense. Two programs a row: each one that is left out costs a moment, too."""
    rows = 2**31 // 2**14 + 2
    gate, up = (ends.room(rows * 2**14).view(rows, -1) for _ in range(2))
    with ACTIVATE.force(Config(ROWS=1, COLUMNS=2**13, num_warps=4), F=2**14, dtype="bf16"):
        return ends(lambda gate, up: [activate(gate, up)], 1, gate, up)
