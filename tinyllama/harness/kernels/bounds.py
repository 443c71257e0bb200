"""Accesses of interpreted kernels, held to the memory of their arguments before they are made.

    bounds = Bounds()
    with watched(bounds.watch):
        ...                      # what is launched
    for access in bounds.out_of_bounds: ...

An access outside of the tensor that its pointer came from is not made, even where it would reach
another tensor of the launch: which one that is depends on where the allocator placed them. A store
out of bounds would change memory of others, or end the process. The access is noted with the
kernel, its program, the argument and the author's line, and the launch goes on, so that other
faults are seen too. A pointer that was a number meanwhile may reach every tensor of the launch.
"""

import bisect
import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch

from tinyllama.harness.kernels.launch_cache import among

_MACHINERY = ("triton", "numpy", "torch", "tinyllama.harness", "tinyllama.testing")
_ADDRESSES = (torch.int64, torch.uint64)  # dtypes of tables of addresses
_LOWEST, _USUAL, _HIGHEST = 2**16, 2**32, 2**47  # addresses of a process: the lowest, most, the end


class Region(NamedTuple):
    """What pointers may access: from start to before end, both with the number of their origin."""

    start: int
    end: int
    name: str


class Bounds:
    """accesses: the number of loads and stores. out_of_bounds: those that were refused, in words;
    one of each kernel, argument and kind.

    inside: of storages (by their first byte) of which only a part may be accessed, that part.
    kernels: those that were launched, each with the file and line where it begins.
    """

    def __init__(self) -> None:
        self.out_of_bounds: list[str] = []
        self.accesses = 0
        self.inside: dict[int, tuple[int, int]] = {}
        self.kernels: dict[str, str] = {}
        self._met: set[tuple[str, str, str]] = set()
        self._launch: Any = None
        self._regions: list[Region] = []
        self._starts: list[int] = []
        self._anywhere = False

    def watch(self, addresses: Any, accessed: Any, size: int, kind: str) -> Any:
        """Which of these accesses are allowed, where not all of them are; else None."""
        from tinyllama.harness.kernels import interpreter, interpreter_values

        self.accesses += 1
        launch, program = interpreter.running()
        if launch is not self._launch:
            self._prepare(launch)
        addresses = np.asarray(addresses, np.uint64)
        low = high = 0
        if addresses.size:  # an array's own methods take twice as long
            low = int(np.minimum.reduce(addresses, axis=None))
            high = int(np.maximum.reduce(addresses, axis=None))
        anywhere = self._anywhere and low <= interpreter_values.ADDRESS
        if not self._regions or self._in_one_region(low, high, size):
            return None
        accessed = np.broadcast_to(accessed, addresses.shape).astype(bool)
        reached = addresses[accessed]  # most that reach too far are masked
        if not reached.size or self._in_one_region(int(reached.min()), int(reached.max()), size):
            return None
        starts = np.array(self._starts, np.uint64)
        ends = np.array([region.end for region in self._regions], np.uint64)
        place = np.searchsorted(starts, addresses, side="right") - 1
        right = (place >= 0) & (addresses + np.uint64(size) <= ends[place])
        if anywhere:
            right |= addresses <= interpreter_values.ADDRESS
        if not (accessed & ~right).any():
            return None
        self._note(launch.kernel, program, int(addresses[accessed & ~right].min()), size, kind)
        return accessed & right

    def _in_one_region(self, low: int, high: int, size: int) -> bool:
        place = bisect.bisect_right(self._starts, low) - 1
        return place >= 0 and high + size <= self._regions[place].end

    def _prepare(self, launch: Any) -> None:
        """What a launch may access: its tensors; from a table of addresses, anything."""
        from tinyllama.harness.kernels import interpreter_values

        code = launch.fn.__code__
        self.kernels[launch.kernel] = f"{code.co_filename}:{code.co_firstlineno}"
        tensors = list(tensors_of(launch.arguments))
        self._launch = launch
        regions: dict[tuple[int, int], Region] = {}
        for name, tensor in tensors:
            storage = tensor.untyped_storage()
            start, end = self._part(storage)
            for number in {0, launch.origins.get(storage.data_ptr(), 0)}:
                origin = number << interpreter_values.ADDRESS_BITS
                region = Region(origin + start, origin + end, name)
                regions.setdefault(region[:2], region)
        self._regions = sorted(regions.values())
        self._starts = [region.start for region in self._regions]
        values = [*launch.arguments.values(), *(tensor for _, tensor in tensors)]
        self._anywhere = not self._regions or any(map(_has_address, values))

    def _part(self, storage: torch.UntypedStorage) -> tuple[int, int]:
        start = storage.data_ptr()
        return self.inside.get(start, (start, start + storage.nbytes()))

    def _note(
        self, kernel: str, program: tuple[int, ...], address: int, size: int, kind: str
    ) -> None:
        def distance(region: Region) -> int:  # of the same origin it is far smaller
            return max(region.start - address, address + size - region.end)

        nearest = min(self._regions, key=distance)
        met = (kernel, nearest.name, kind)
        if met in self._met:
            return
        self._met.add(met)
        if address < nearest.start:
            where = f"{nearest.start - address} bytes before the start of {nearest.name}"
        else:
            gap = address - nearest.end
            behind = "across" if gap < 0 else f"{gap} bytes behind" if gap else "right behind"
            where = f"{behind} the end of {nearest.name}"
        length = nearest.end - nearest.start
        self.out_of_bounds.append(
            f"{author_line()}{kernel}, program {program}: {_article(kind)} of {size} bytes, "
            f"{where}, a buffer of {length} bytes"
        )


def _has_address(value: Any) -> bool:
    """Whether a number or an element may be an address: indices of elements are smaller, and what
    memory is filled with before it is written is larger. The heap of an executable that is not
    position-independent lies lower, among the indices, so that its bounds decide there."""
    if isinstance(value, int):
        if not _LOWEST <= value < _HIGHEST:
            return False
        value = torch.tensor([value])
    if not isinstance(value, torch.Tensor) or value.dtype not in _ADDRESSES or not value.numel():
        return False
    values = value.detach().view(torch.int64)
    values = values[(values >= _LOWEST) & (values < _HIGHEST)]
    if not values.numel() or bool((values >= _USUAL).any()):
        return values.numel() > 0
    return any(bool(((values >= low) & (values < end)).any()) for low, end in _low_memory())


def _low_memory() -> Iterator[tuple[int, int]]:
    """The memory of this process below 2^32 that may be written: its first byte, and its end."""
    with open("/proc/self/maps") as lines:  # in the order of their addresses
        for line in lines:
            span, rights, *_ = line.split()
            low, _, end = span.partition("-")
            if int(low, 16) >= _USUAL:
                return
            if rights.startswith("rw"):
                yield int(low, 16), int(end, 16)


def _article(kind: str) -> str:
    return f"an {kind}" if kind[0] == "a" else f"a {kind}"


def tensors_of(arguments: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a launch on the CPU by argument, those of descriptors and in tuples too."""
    for name, value in arguments.items():
        several = value if isinstance(value, (tuple, list)) else [value]
        for place, entry in enumerate(several):
            tensor = getattr(entry, "base", entry)  # of a descriptor, or a reinterpreted tensor
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                yield name if len(several) == 1 else f"{name}[{place}]", tensor


def author_line() -> str:
    """``FILE:LINE: `` of the author's code that is running, the innermost; "" where none is."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        machinery = any(f"{module}.".startswith(f"{name}.") for name in _MACHINERY)
        if not machinery and not frame.f_code.co_filename.startswith("<"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}: "
        frame = frame.f_back
    return ""


def watched(watch: Callable[..., Any]) -> contextlib.AbstractContextManager[Any]:
    """Meanwhile, call a function for every access of an interpreted kernel."""
    from tinyllama.harness.kernels import interpreter_values

    return among(interpreter_values.WATCHERS, watch)
