"""Cold caches, as a kernel finds them in a step whose other kernels have just used them."""

import functools
import re
from pathlib import Path

import torch

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}

# AMD's CDNA3 has 256 MiB behind the L2 ("Infinity Cache"; CDNA 3 white paper), which torch does
# not report, so every GPU is flushed with at least twice that.
LARGEST_UNREPORTED = 256 * 2**20


def last_level_bytes(device: torch.device) -> int:
    """Bytes of the last cache before a device's memory, or more."""
    if device.type != "cpu":
        return max(torch.cuda.get_device_properties(device).L2_cache_size, LARGEST_UNREPORTED)
    sizes = [
        re.fullmatch(r"(\d+)([KMG]?)", path.read_text().strip())
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    sizes_in_bytes = [int(size[1]) * _UNITS[size[2]] for size in sizes if size]
    return max(sizes_in_bytes, default=64 * 2**20)


class Flush:
    """Calling it evicts the contents of the caches, by reading twice their size.

    It does not write: dirty lines would be written back at the cost of what is timed next.
    """

    def __init__(self, device: torch.device) -> None:
        words = -(-2 * last_level_bytes(device) // 4)
        self.buffer = torch.zeros(words, dtype=torch.int32, device=device)
        self.largest = torch.empty((), dtype=torch.int32, device=device)

    def __call__(self) -> None:
        torch.amax(self.buffer, 0, out=self.largest)


@functools.cache
def flush_of(device: torch.device) -> Flush:
    """That of this process: it takes half a GiB of a GPU."""
    return Flush(device)
