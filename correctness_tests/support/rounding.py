"""Random tensors, and results that are off by roundings alone."""

from typing import Any

import torch


def randn(
    *shape: int, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Any:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(device, dtype)


def assert_rounded(result: torch.Tensor, exact: torch.Tensor, roundings: int = 1) -> None:
    """As far from float64 as so many roundings to the result's dtype leave it, at most: one is
    half a unit of the last place."""
    error = (result.double() - exact).norm()
    assert error <= 0.5 * roundings * torch.finfo(result.dtype).eps * exact.norm()
