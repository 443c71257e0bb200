"""Offsets past 2^31 without the memory: kernels interpreted on addresses that cost nothing.

Untouched memory is only addresses. So rows may lie 2^30 elements apart, or a tensor may have 2^31
elements of which a few programs touch the first and the last.
"""

import contextlib
import importlib
import importlib.util
import mmap
from collections.abc import Callable, Iterator

import torch

from tinyllama.harness.declare.offsets import Pairs, Results, randn
from tinyllama.harness.declare.op import Op
from tinyllama.harness.kernels.programs import ends

BEYOND = 2**31
APART = 2**30 + 64  # elements; a stride of more would itself have 64 bits, and hide a narrow row
BF16 = torch.bfloat16
FIRST_AND_LAST = [0, -1]


class NoAddressesError(RuntimeError):
    """The system promises no memory that it may not have."""


def load(op: Op) -> Op:
    """The op with what its ``offsets.py`` registers, where it is a folder with one."""
    name = f"{op.module}.offsets"
    if op.folder is not None and importlib.util.find_spec(name) is not None:
        importlib.import_module(name)
    return op


def room(elements: int) -> torch.Tensor:
    """Zeros in bfloat16, of which only what is touched takes memory. Raises NoAddressesError."""
    with _enough_addresses():
        block = mmap.mmap(-1, elements * BF16.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without huge pages
        block.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(block, dtype=BF16)


@contextlib.contextmanager
def _enough_addresses() -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:
        if "allocate memory" not in str(error):  # torch's and the system's words for it
            raise
        raise NoAddressesError(str(error)) from error


class Far:
    """Puts tensors into one room, slices of an axis ``APART`` elements from each other."""

    def __init__(self) -> None:
        self._room, self._next = room(BEYOND + 2**25), 0

    def __call__(self, x: torch.Tensor, axis: int = 0, stride: int = APART) -> torch.Tensor:
        sizes = [n for i, n in enumerate(x.shape) if i != axis]
        strides = list(torch.empty(sizes, device="meta").stride())
        strides.insert(axis, stride)
        view = self._room.as_strided(x.shape, strides, self._next)
        self._next += x[:0].numel() + x.numel() // x.shape[axis]
        return view.copy_(x)


def near(x: torch.Tensor, axis: int = 0, stride: int = APART) -> torch.Tensor:
    """A dense copy, in the place of `Far`."""
    return x.clone()


class EndsAlone:
    """Kernels run by the first and the last programs of their grids alone; see
    `tinyllama.harness.declare.offsets.Ends`."""

    room = staticmethod(room)

    def __call__(
        self, call: Callable[..., Results], programs: int, *far: torch.Tensor, both: bool = False
    ) -> Pairs:
        for seed, x in enumerate(far):
            drawn = randn(2, *x.shape[1:], seed=seed).abs()  # AdamW takes a root
            x[FIRST_AND_LAST] = drawn.to(x.dtype) / 3  # in float32 more digits than 16 bits have
        near = [x[FIRST_AND_LAST] for x in far]
        expected = [] if both else call(*near)
        with ends(programs), _enough_addresses():
            found = call(*far)
            expected = expected or call(*near)
        return [(x[FIRST_AND_LAST], y) for x, y in zip(found, expected, strict=True)]
