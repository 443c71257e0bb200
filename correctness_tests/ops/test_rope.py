"""What the derived cases cannot ask of the rotation: views of packed buffers, one tensor alone."""

import pytest
import torch

from correctness_tests.support.rounding import assert_rounded, randn
from tinyllama.harness.kernels import layout
from tinyllama.ops.rope import rope, rope_tables, rotate

pytest.importorskip("triton")

FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(("H", "G"), [(1, 1), (3, 1), (4, 2), (5, 5)])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_rotation_in_place_in_a_packed_buffer(
    H: int, G: int, dtype: torch.dtype, device: torch.device
) -> None:
    """As the block does it: q, k and v lie side by side; v stays, and back is back."""
    B, T, K = 2, 5, 24
    packed = randn(B, T, H + 2 * G, K, device=device, dtype=dtype)
    cos, sin = (table.to(device) for table in rope_tables(T, K))
    q, k, v = packed.split((H, G, G), 2)
    before = packed.clone()
    expected = rope(q.double(), k.double(), *(table.double() for table in (cos, sin)))
    copies = layout.copies
    rotate(q, k, cos, sin, q, k)
    assert layout.copies == copies
    for got, exact, old in zip((q, k), expected, before.split((H, G, G), 2)[:2], strict=True):
        assert_rounded(got, exact, 1 if dtype is BF16 else 4)
        assert (got[:, 1:] != old[:, 1:]).any(-1).all(), "a head was not rotated"
    assert torch.equal(v, before[:, :, H + G :])
    rotate(q, k, cos, sin, q, k, inverse=True)
    assert_rounded(packed, before.double(), 4)


def test_one_of_the_two_may_be_left_out(device: torch.device) -> None:
    q, k = randn(1, 4, 3, 8, device=device), randn(1, 4, 2, 8, device=device, seed=1)
    cos, sin = (table.to(device) for table in rope_tables(4, 8))
    buffers = torch.empty_like(q), torch.empty_like(k)
    rotate(q, k, cos, sin, *buffers)
    alone = torch.empty_like(q), torch.empty_like(k)
    rotate(q, None, cos, sin, alone[0], None)
    rotate(None, k, cos, sin, None, alone[1])
    assert torch.equal(buffers[0], alone[0])
    assert torch.equal(buffers[1], alone[1])


def test_rotation_refuses_an_output_that_it_cannot_write(device: torch.device) -> None:
    q = randn(1, 2, 2, 8, device=device)
    cos, sin = (table.to(device) for table in rope_tables(2, 8))
    out = torch.empty(1, 2, 2, 16, device=device)[..., ::2]
    with pytest.raises(ValueError, match="make the last one 1"):
        rotate(q, q, cos, sin, out, out)
