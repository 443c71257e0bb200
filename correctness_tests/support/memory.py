"""Tensors of the CPU whose addresses are low or high, and low numbers that are no addresses."""

import mmap
import platform

import pytest
import torch

_FIRST_2_GIB = 0x40  # MAP_32BIT of mmap(2), which mmap names from Python 3.13 on


def filled(value: float, *, low: bool, count: int = 8) -> torch.Tensor:
    """So many float32, at an address below 2^32 or above. A small tensor of the allocator's is low
    where Python is not position-independent, as in Debian and Ubuntu."""
    if low and platform.machine() != "x86_64":
        pytest.skip("only x86-64 has MAP_32BIT")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_FIRST_2_GIB if low else 0)
    made = torch.frombuffer(mmap.mmap(-1, 4 * count, flags), dtype=torch.float32, count=count)
    assert (made.data_ptr() < 2**32) == low
    return made.fill_(value)


def no_address() -> int:
    """A number below 2^32 at which this process has no memory; drivers of GPUs map some there."""
    with open("/proc/self/maps") as lines:
        spans = [[int(end, 16) for end in line.split(maxsplit=1)[0].split("-")] for line in lines]
    numbers = range(2**32 - 2**16, 2**31, -(2**20))
    return next(n for n in numbers if not any(low <= n < high for low, high in spans))
