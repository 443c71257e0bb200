"""`tools.sanitize` plants the fault that its tool must see."""

import pytest
import torch

from tools import sanitize


def test_planted_kernel_stores_beyond_its_buffer() -> None:
    """So a sanitizer that finds nothing in it sees nothing."""
    pytest.importorskip("triton")
    x, wide = torch.ones(100), torch.full((128,), 7.0)
    sanitize.stray_kernel[(1,)](x, wide, 100)
    assert wide[99:102].tolist() == [1, 0, 7]
