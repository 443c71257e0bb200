"""Attention in one launch with the product that makes q, k and v."""

from __future__ import annotations

import pytest
import torch

from tinyllama.harness.kernels.configs import Config
from tinyllama.harness.kernels.launch import recorded
from tinyllama.harness.machine.device import cannot
from tinyllama.ops.rope import rope_tables
from tinyllama.ops.stack import Fused, Inputs
from tinyllama.ops.stack.in_one import ATTEND

pytestmark = pytest.mark.skipif(
    cannot("triton", torch.device("cpu")) is not None, reason="triton is not installed"
)
LAYERS, HIDDEN, FFN, EPS = 2, 48, 24, 1e-5
# tokens, heads, heads of keys and values, head dimension: whole blocks, and nothing that is whole
SHAPES = [(16, 4, 2, 16), (9, 6, 2, 8), (33, 2, 2, 24), (1, 1, 1, 2)]


def inputs(tokens: int, heads: int, groups: int, width: int, device: torch.device) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    columns, rows = heads * width, groups * width

    def drawn(*shape: int) -> torch.Tensor:
        values = torch.randn(*shape, generator=generator) * 0.3
        return values.to(device, torch.bfloat16)

    attention = [drawn(LAYERS, n, HIDDEN) for n in (columns, rows, rows)]
    mlp = [drawn(LAYERS, FFN, HIDDEN), drawn(LAYERS, FFN, HIDDEN), drawn(LAYERS, HIDDEN, FFN)]
    cos, sin = (table.to(device) for table in rope_tables(tokens, width))
    gains = torch.linspace(0.5, 1.5, 2 * LAYERS * HIDDEN, device=device).view(2, LAYERS, -1)
    x, out = drawn(3, tokens, HIDDEN), drawn(LAYERS, HIDDEN, columns)
    return Inputs._make((x, cos, sin, gains[0], *attention, out, gains[1], *mlp))


def key(tokens: int, width: int) -> dict[str, int]:
    D, length = (max(16, 1 << (n - 1).bit_length()) for n in (width, tokens))
    return {"D": D, "tokens": length}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "T{}H{}G{}K{}".format(*shape))
def test_in_one_launch_it_writes_what_two_launches_write(
    shape: tuple[int, int, int, int], device: torch.device
) -> None:
    """Everything that the forward pass gives and saves."""
    given, where = inputs(*shape, device), key(shape[0], shape[3])
    found = []
    for step in (0, 16):
        with ATTEND.force(Config(BK=step, num_warps=4), **where):
            found.append(Fused.forward(given, EPS))
    assert len(found[0]) == len(found[1])
    for apart, together in zip(*found, strict=True):
        difference = (apart.double() - together.double()).norm()
        assert difference <= 1e-2 * apart.double().norm()


def test_the_chips_table_says_whether_it_is_one_launch() -> None:
    def launched(chip: str, tokens: int, dtype: torch.dtype = torch.bfloat16) -> set[str]:
        cpu = inputs(tokens, 2, 1, 64, torch.device("cpu"))
        given = Inputs._make(tensor.to("meta", dtype) for tensor in cpu)
        with recorded(chip) as launches:
            Fused.forward(given, EPS)
        return {launch.identity for launch in launches}

    assert "stack.attend_kernel" in launched("sm_90", 128)
    apart = {"stack.qkv_kernel", "attention.forward_kernel"}
    for chip, tokens, dtype in (
        ("gfx942", 128, torch.bfloat16),  # nothing was measured there
        ("sm_90", 129, torch.bfloat16),  # more tokens than a program holds
        ("sm_90", 128, torch.float32),
    ):
        assert apart < launched(chip, tokens, dtype)
