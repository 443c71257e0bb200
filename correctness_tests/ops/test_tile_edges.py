"""What the tiles of kernels reach behind the last row of a tensor, at sizes that no case has."""

import contextlib
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.support.attention_blocks import blocks
from correctness_tests.support.stacks import EPS, inputs
from tinyllama.harness.check.guards import GuardedMemory
from tinyllama.harness.kernels.bounds import watched
from tinyllama.harness.kernels.configs import Config
from tinyllama.ops import attention as attention_file
from tinyllama.ops.attention import attend, attend_backward
from tinyllama.ops.rms_norm import norm_backward
from tinyllama.ops.stack import Fused, Inputs
from tinyllama.ops.stack.in_one import ATTEND


@contextlib.contextmanager
def guarded(device: torch.device) -> Iterator[GuardedMemory]:
    """Loads are seen where they are interpreted, stores everywhere."""
    memory = GuardedMemory()
    with memory, watched(memory.watch) if device.type == "cpu" else contextlib.nullcontext():
        yield memory
    assert not memory.broken()


@pytest.mark.parametrize("D", [24, 512])  # without and with prefetching
def test_nothing_is_read_behind_the_last_row(D: int, device: torch.device) -> None:
    """Rows that a tile has and the tensors have not."""
    with guarded(device) as memory:
        tensors = [torch.randn(9, D, device=device) for _ in range(3)]
        dy, x, residual, rstd = map(memory.guarded, (*tensors, torch.ones(9, device=device)))
        norm_backward(dy, x, memory.guarded(x[0]), rstd, residual)


@pytest.mark.parametrize("tokens", [37, 64])  # 64 are whole blocks
@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("K", [1, 12])
def test_nothing_is_read_beside_a_head_that_is_padded(
    K: int, turn: int, tokens: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Narrow heads in tiles of 16, of the tensors and of their transposes."""
    monkeypatch.setattr(attention_file, "FEW_TOKENS", 0)
    with guarded(device) as memory, blocks(32, 16, turn=turn):
        q, k, v, do = (
            memory.guarded(torch.randn(1, tokens, heads, K, device=device))
            for heads in (2, 1, 1, 2)
        )
        o, lse = attend(q, k, v)
        attend_backward(do, q, k, v, o, lse, *map(torch.empty_like, (q, k, v)))


@pytest.mark.parametrize("step", [0, 16])  # in two launches, and in one
def test_a_stack_reads_nothing_beside_what_it_is_given(step: int, device: torch.device) -> None:
    """Heads of 24 in tiles of 32, and 33 tokens: no axis is whole."""
    tensors = inputs(33, 2, 2, 24, device)
    with (
        guarded(device) as memory,
        ATTEND.force(Config(BK=step, DESCRIBED=0, num_warps=4), D=32, tokens=64),
    ):
        Fused.forward(Inputs._make(map(memory.guarded, tensors)), EPS)
