"""How a verified result is recognised: a digest of its bits, and projections on random signs."""

import functools
from collections.abc import Iterable

import torch

PROJECTIONS = 8
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PART = 2**24  # elements at a time
_FEW = 2**18  # of which the weights are kept
_ODD = 0x9E3779B97F4A7C15 - 2**64  # multiplicative hashing, Knuth 6.4


def bits_of(value: torch.Tensor) -> torch.Tensor:
    return value.detach().contiguous().view(_INTEGERS[value.element_size()]).flatten()


def digest(value: torch.Tensor) -> int:
    """A digest of the bits and their places, modulo 2**64; equal on every device."""
    return digest_of_all([value])[0]


def digest_of_all(values: Iterable[torch.Tensor]) -> list[int]:
    """The digest of each tensor. The host waits for the device only once."""
    found = [_sum(_words(bits_of(value))) for value in values]
    together = [one.to(found[0].device) for one in found]
    return [one % 2**64 for one in torch.stack(together).tolist()] if found else []


def _sum(words: torch.Tensor) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for part, start in zip(words.split(_PART), range(0, words.numel(), _PART), strict=False):
        few = part.numel() <= _FEW
        weights = (_kept_weights if few else _weights)(start, part.numel(), part.device)
        wide = part.to(torch.int64)
        wide = wide ^ (wide >> 32)  # round float64 numbers differ in their upper bits alone
        total += wide.add_(1).mul_(weights).sum()
    return total


def _weights(start: int, count: int, device: torch.device) -> torch.Tensor:
    """An odd number for each place."""
    return torch.arange(start, start + count, device=device).mul_(_ODD).bitwise_or_(1)


_kept_weights = functools.lru_cache(maxsize=64)(_weights)  # of small results, in each timed call


def _words(bits: torch.Tensor) -> torch.Tensor:
    """The same bits as words of eight bytes, if they fill whole words."""
    each = 8 // bits.element_size()
    if bits.numel() % each:
        return bits
    return (bits.clone() if bits.storage_offset() % each else bits).view(torch.int64)


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
