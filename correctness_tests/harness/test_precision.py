"""In which precision products are computed: what is asked for, and what a device can do."""

import pytest
import torch

pytest.importorskip("triton")

from tinyllama.harness.kernels import precision
from tinyllama.harness.kernels.precision import compute_dtype, product

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def test_autocast_holds_for_its_device_and_for_float32() -> None:
    meta = torch.empty(1, device="meta")
    assert [precision.autocast_kind(one) for one in (torch.empty(1), meta)] == ["cpu", "cuda"]
    with torch.autocast("cpu", BF16), torch.autocast("cuda", FP16, enabled=False):
        found = [compute_dtype(torch.empty(1, dtype=one)) for one in (FP32, FP16, torch.float64)]
        assert found == [BF16, FP16, torch.float64]
        assert compute_dtype(meta) is FP32
    assert compute_dtype(torch.empty(1)) is FP32


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_product_is_in_the_dtype_and_the_memory_that_are_wanted(
    dtype: torch.dtype, into: bool
) -> None:
    a, b = torch.tensor([[1.0, 2.0]], dtype=BF16), torch.tensor([[3.0], [4.0]], dtype=BF16)
    memory = torch.empty(1, 1, dtype=dtype) if into else None
    found = product(a, b, dtype, memory)
    assert found.dtype is dtype
    assert found.item() == 11.0
    assert memory is None or memory.item() == 11.0
