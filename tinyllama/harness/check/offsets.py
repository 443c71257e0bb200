"""Offsets past 2^31 without the memory: kernels interpreted on addresses that cost nothing.

Untouched memory is only addresses. So rows may lie 2^30 elements apart.
"""

import contextlib
import mmap
from collections.abc import Iterator

import torch

BEYOND = 2**31
APART = 2**30 + 64  # elements; a stride of more would itself have 64 bits, and hide a narrow row
BF16 = torch.bfloat16


class NoAddressesError(RuntimeError):
    """The system promises no memory that it may not have."""


def room(elements: int) -> torch.Tensor:
    """Zeros in bfloat16, of which only what is touched takes memory. Raises NoAddressesError."""
    with addresses_promised():
        block = mmap.mmap(-1, elements * BF16.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without huge pages
        block.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(block, dtype=BF16)


@contextlib.contextmanager
def addresses_promised() -> Iterator[None]:
    """Raises NoAddressesError for what the system or torch raises where there is no memory."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if "allocate memory" not in str(error):  # torch's and the system's words for it
            raise
        raise NoAddressesError(str(error)) from error


class Far:
    """Puts tensors into one room, slices of an axis ``APART`` elements from each other."""

    def __init__(self, dtype: torch.dtype = BF16) -> None:
        elements = (BEYOND + 2**25) * dtype.itemsize // BF16.itemsize
        self._room, self._next = room(elements).view(dtype), 0

    def __call__(self, x: torch.Tensor, axis: int = 0, stride: int = APART) -> torch.Tensor:
        sizes = [n for i, n in enumerate(x.shape) if i != axis]
        strides = list(torch.empty(sizes, device="meta").stride())
        strides.insert(axis, stride)
        view = self._room.as_strided(x.shape, strides, self._next)
        self._next += x[:0].numel() + x.numel() // x.shape[axis]
        return view.copy_(x)
