"""Hints that a kernel gives its compiler, compared with the values of an interpreted one.

A compiled kernel reads in vectors as wide as `tl.multiple_of` and `tl.max_contiguous` allow. Where
a hint is false it reads other elements, or ends with a misaligned address; interpreted, it
would be right all the same. `tl.assume` is verified by Triton.
"""

from typing import Any

import numpy as np

# While not empty, what the mask of a load without ``other`` leaves out is garbage, as on a GPU it
# may be: there it is undefined. Interpreted, it would be 0.
UNDEFINED: list[object] = []
# While not empty, products of float32 round what they multiply to tf32 where `tl.dot` was not asked
# for another precision, as on a GPU that has it. Interpreted, they would be exact.
TF32: list[object] = []
ADDRESS_BITS = 48  # of a pointer; what lies above is not part of its address


class FalseHintError(AssertionError):
    """A hint to the compiler that is not true."""


def verify(values: Any, dtype: Any, name: str, hint: list[int]) -> None:
    """Raise FalseHintError where a hint about these values (of a number or a block) is false:
    the first is no multiple, or neighbours in a block of one axis do not follow each other."""
    data = np.asarray(values)
    if dtype.is_ptr():
        data = data.astype(np.uint64) & np.uint64(2**ADDRESS_BITS - 1)
    if name == "tt.divisibility" and data.size:
        first = int(data.flat[0])
        number = next((n for n in hint if n and first % n), None)
        if number is not None:
            what = "the address" if dtype.is_ptr() else "the number"
            raise FalseHintError(
                f"tl.multiple_of promises a multiple of {number}; {what} is {first}"
            )
    if name == "tt.contiguity" and data.ndim == 1 and data.size > 1:
        step = max(1, dtype.element_ty.primitive_bitwidth // 8) if dtype.is_ptr() else 1
        gaps = np.diff(data.astype(np.int64))
        within = (np.arange(1, data.size) % max(1, hint[0])) != 0
        if (gaps[within] != step).any():
            raise FalseHintError(f"tl.max_contiguous promises {hint[0]} neighbours; they are not")


def left_out(loaded: Any, mask: Any, first: int) -> None:
    """Put garbage where this mask of a load is false, in place: NaN, which a maximum leaves out,
    and large numbers of either sign, in turn. first: where the turn begins."""
    data = np.asarray(loaded)
    if data.dtype.kind == "f":
        large = np.finfo(data.dtype).max / 4
        garbage = [np.nan, large, -large]
    elif data.dtype.kind in "iu":
        limits = np.iinfo(data.dtype)
        garbage = [limits.max // 4 * 3 + 1, limits.min // 4 * 3 + 1]  # the least, unsigned, is 1
    else:
        return
    out = ~np.broadcast_to(mask, data.shape)
    data[out] = np.resize(np.roll(np.array(garbage, data.dtype), -first), out.sum())


def in_tf32(values: Any) -> Any:
    """Of float32, the nearest numbers with 10 bits behind the point."""
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x1000) & 0xFFFFE000).astype(np.uint32).view(np.float32)
