"""The kernels of the norms at offsets past 2^31."""

from unittest import mock

import torch

from tinyllama.harness.declare.offsets import Ends, Pairs, Put, Results, randn
from tinyllama.ops.rms_norm import kernels, rms_norm

EPS, BF16 = 1e-5, torch.bfloat16


@rms_norm.rows_apart
def norm(put: Put) -> Results:
    x, residual, dy, dresidual = (put(randn(3, 40, seed=seed)) for seed in range(4))
    weight = randn(40)
    y, rstd = kernels.norm_forward(x, weight, EPS, BF16)
    dx, low, partials = kernels.norm_backward(dy, x, weight, rstd, dresidual, torch.float32)
    added, total, scale = kernels.launch_forward(x, residual, weight, EPS, BF16)
    assert low is not None
    assert total is not None
    return [y, rstd, dx, low, partials, added, total, scale]


@rms_norm.many_programs
def many_rows(ends: Ends) -> Pairs:
    """Rows of the widest norm, and as many rows of partial sums."""
    weight = randn(kernels.WIDEST)

    def call(x: torch.Tensor, dy: torch.Tensor) -> Results:
        y, total, rstd = kernels.launch_forward(x, dy, weight, EPS, BF16)
        dx, low, partials = kernels.norm_backward(dy, x, weight, rstd, x, torch.float16)
        assert total is not None
        assert low is not None
        return [y, total, rstd, dx, low, partials]

    rows = 2**31 // kernels.WIDEST + 2
    far = (ends.room(rows * kernels.WIDEST).view(rows, -1) for _ in range(2))
    with mock.patch.object(kernels, "partial_rows", lambda n_rows, device: n_rows):
        return ends(call, 1, *far)
