"""What the tiles of kernels reach behind the last row of a tensor, at sizes that no case has."""

from __future__ import annotations

import contextlib

import pytest
import torch

pytest.importorskip("triton")

from tinyllama.harness.checks.guards import GuardedMemory, watched
from tinyllama.ops.rms_norm import norm_backward


@pytest.mark.parametrize("D", [24, 512])  # without and with the next tile asked for ahead
def test_nothing_is_read_behind_the_last_row(D: int, device: torch.device) -> None:
    """Rows that a tile has and the tensors have not: loads are seen where they are interpreted."""
    rows, memory = 9, GuardedMemory()
    interpreted = watched(memory.watch) if device.type == "cpu" else contextlib.nullcontext()
    with memory, interpreted:
        tensors = [torch.randn(rows, D, device=device) for _ in range(3)]
        rstd = torch.ones(rows, device=device)
        dy, x, residual, rstd = map(memory.guarded, (*tensors, rstd))
        norm_backward(dy, x, memory.guarded(x[0]), rstd, residual)
    assert not memory.broken()
