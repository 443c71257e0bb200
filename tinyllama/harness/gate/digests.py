"""How a verified result is recognised: a digest of its bits, and projections on random signs."""

from __future__ import annotations

import torch

PROJECTIONS = 8
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PART = 2**24  # elements at a time
_ODD = 0x9E3779B97F4A7C15 - 2**64  # multiplicative hashing, Knuth 6.4


def bits_of(value: torch.Tensor) -> torch.Tensor:
    return value.detach().contiguous().view(_INTEGERS[value.element_size()]).flatten()


def digest(value: torch.Tensor) -> int:
    """A digest of the bits and their places, modulo 2**64; equal on every device."""
    bits, total = bits_of(value), 0
    for part, start in zip(bits.split(_PART), range(0, bits.numel(), _PART), strict=False):
        places = torch.arange(start, start + part.numel(), device=part.device)
        wide = part.to(torch.int64)
        wide = (wide ^ (wide >> 32)) + 1  # round float64 numbers differ in their upper bits alone
        total += int((wide * ((places * _ODD) | 1)).sum().item())
    return total % 2**64


def projections(value: torch.Tensor) -> tuple[float, ...]:
    """Sums over the elements with random signs."""
    if not value.dtype.is_floating_point:
        return (0.0,) * PROJECTIONS
    flat, found = value.detach().flatten(), [0.0] * PROJECTIONS
    for start in range(0, flat.numel(), _PART):
        part = flat[start : start + _PART].double()
        generator = torch.Generator(part.device).manual_seed(start)
        for place in range(PROJECTIONS):
            signs = torch.empty_like(part).uniform_(-1, 1, generator=generator).sign_()
            found[place] += float((part * signs).sum())
    return tuple(found)
