"""How a verified result is recognised: a digest of its bits, and projections on random signs."""

import functools
from collections.abc import Iterable, Iterator, Sequence

import torch

PROJECTIONS = 8
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PART = 2**24  # elements at a time
_SOME = 2**20  # of a result that is taken together with others
_FEW = 2**18  # of which the weights are kept
_ODD = 0x9E3779B97F4A7C15 - 2**64  # multiplicative hashing, Knuth 6.4


def bits_of(value: torch.Tensor) -> torch.Tensor:
    return value.detach().contiguous().view(_INTEGERS[value.element_size()]).flatten()


def digest(value: torch.Tensor) -> int:
    """A digest of the bits and their places, modulo 2**64; equal on every device."""
    return digest_of_all([value])[0]


def digests_of_calls(calls: Sequence[Sequence[torch.Tensor]]) -> list[int]:
    """A digest of the bits of all results of each call, and of their places: calls with results of
    the same shapes and bits have the same. The host waits for the device only once.

    Small results of several calls are taken together: each kernel for one tensor alone takes longer
    to launch than to run.
    """
    each = [[_words(bits_of(value)) for value in results] for results in calls]
    sizes = {tuple((one.dtype, one.numel()) for one in words) for words in each}
    if len(sizes) == 1 and 0 < (total := sum(one.numel() for one in each[0])) <= _FEW:
        flat = torch.cat([one.to(torch.int64) for words in each for one in words])
        weights = _kept_weights(0, total, flat.device)
        return [one % 2**64 for one in _mixed(flat.view(-1, total), weights).sum(1).tolist()]
    found = [torch.stack(list(_sums(words))).sum() for words in each if words]
    together = [one.to(found[0].device) for one in found]
    sums = [one % 2**64 for one in torch.stack(together).tolist()] if found else []
    return [sums.pop(0) if words else 0 for words in each]


def _sums(words: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The sums over results of a call; those that are small and in a row are taken together."""
    first, few = 0, list[torch.Tensor]()
    for one in words:
        if few and (one.numel() > _SOME or sum(part.numel() for part in few) > _PART - _SOME):
            yield _sum(torch.cat(few), first)
            first, few = first + sum(part.numel() for part in few), []
        if one.numel() > _SOME:
            yield _sum(one, first)
            first += one.numel()
        else:
            few.append(one.to(torch.int64))
    if few:
        yield _sum(torch.cat(few), first)


def digest_of_all(values: Iterable[torch.Tensor]) -> list[int]:
    """The digest of each tensor. The host waits for the device only once."""
    found = [_sum(_words(bits_of(value))) for value in values]
    together = [one.to(found[0].device) for one in found]
    return [one % 2**64 for one in torch.stack(together).tolist()] if found else []


def _sum(words: torch.Tensor, first: int = 0) -> torch.Tensor:
    """first: the place of the first word."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for part, start in zip(words.split(_PART), range(0, words.numel(), _PART), strict=False):
        few = part.numel() <= _FEW
        weights = (_kept_weights if few else _weights)(first + start, part.numel(), part.device)
        total += _mixed(part.to(torch.int64), weights).sum()
    return total


def _mixed(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Round float64 numbers differ in their upper bits alone."""
    return (words ^ (words >> 32)).add_(1).mul_(weights)


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
    flat = value.detach().flatten()
    found = torch.zeros(PROJECTIONS, dtype=torch.float64, device=value.device)
    for start in range(0, flat.numel(), _PART):
        part = flat[start : start + _PART].double()
        generator = torch.Generator(part.device).manual_seed(start)
        for place in range(PROJECTIONS):
            signs = torch.empty_like(part).uniform_(-1, 1, generator=generator).sign_()
            found[place] += (part * signs).sum()
    return tuple(found.tolist())
