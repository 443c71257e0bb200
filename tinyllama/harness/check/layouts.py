"""Memory layouts in which inputs and upstream gradients are tried."""

from collections.abc import Sequence
from typing import Any

import torch

LAYOUTS = ("contiguous", "strided", "transposed", "expanded", "distinct", "offset", "padded")
UPSTREAMS = ("contiguous", "strided", "transposed", "summed", "distinct", "offset", "padded")
# Tried in one dtype: the two axes before the last one in the other order, as heads before tokens;
# the second axis the innermost one, as channels; a gap behind each matrix alone, as of tokens that
# are cut off, or behind the second axis alone; one element for the last axis; one row for the axis
# before it.
RARE = ("swapped", "channels_last", "cut", "parted", "broadcast", "shared")
# Dense, with another stride of each axis of one entry than elsewhere: to torch it is contiguous
# whatever that is. Tried by `sizes`, at 1.
SINGLE = "single"
AXES = {"broadcast": 1, "parted": 4}  # so many a tensor has in such a layout; in others three
TIED = ("broadcast", "shared")  # of these layouts: values that random ones never are
# An upstream gradient, dense and small: of the mean over many tokens, or with a loss scale.
FAINT = "faint"
FAINTNESS = {torch.float16: 2.0**-17}  # within its subnormal numbers
# As a message says it of a tensor.
ABOUT = {
    "strided": "every second element of a row",
    "transposed": "axes in reverse order in memory",
    "expanded": "one row for all, with stride 0",
    "summed": "one element for all, with stride 0, as .sum().backward() gives it",
    "distinct": "gaps between elements and rows, in each tensor others",
    "offset": "not aligned to 16 bytes",
    "padded": "a gap behind each row",
    "swapped": "two axes exchanged in memory",
    "channels_last": "the second axis innermost in memory",
    "cut": "a gap behind each matrix",
    "parted": "a gap behind the second axis",
    "broadcast": "one element for the last axis, with stride 0",
    "shared": "one row for the axis before the last, with stride 0",
    SINGLE: "an unusual stride of an axis of one entry",
    FAINT: "tiny numbers",
}
# Which change values; the others only say where they lie.
REPEATING = ("expanded", "summed", "broadcast", "shared", FAINT)


def laid_out(
    sample: torch.Tensor, dtype: torch.dtype, device: torch.device | str, layout: str, place: int
) -> torch.Tensor:
    """The sample on a device, in this layout; ``place``: its number among the call's tensors.
    Raises ValueError for an unknown layout."""
    names = dict.fromkeys((*LAYOUTS, *UPSTREAMS, *RARE, SINGLE, FAINT))
    if layout not in names:
        raise ValueError(f"unknown layout {layout!r}: use one of {', '.join(names)}")
    tensor = sample.to(dtype=dtype, device=device)
    if layout == "contiguous" or tensor.dim() == 0:
        return tensor.contiguous()
    if layout == FAINT:
        return (tensor.double() * FAINTNESS.get(dtype, 2.0**-40)).to(dtype)
    shape = tensor.shape
    if layout == "expanded":  # one row for all of the first axis
        return tensor[:1].clone().expand(shape) if tensor.dim() > 1 else tensor
    if layout == "summed":  # one element for all of the tensor
        return tensor.flatten()[:1].clone().expand(shape)
    if layout == "transposed":  # the memory order of the axes reversed
        order = tuple(reversed(range(tensor.dim())))
        return tensor.permute(order).contiguous().permute(order)
    if layout == SINGLE:
        dense = tensor.contiguous()
        strides = [
            stride if size > 1 else 1 if axis == 0 else tensor.numel() + stride
            for axis, (size, stride) in enumerate(zip(shape, dense.stride(), strict=True))
        ]
        return dense.as_strided(shape, strides)
    if layout == "strided":  # every second element of the last axis
        return _with_gaps(tensor, (*shape[:-1], 2 * shape[-1]), (..., slice(None, None, 2)))
    if layout == "distinct":  # elements and rows as far apart as in no other tensor of the call
        width = place * (shape[-1] + 1)
        return _with_gaps(tensor, (*shape[:-1], width), (..., slice(None, -place, place)))
    if layout == "padded":  # dense rows with a gap behind each, and one behind the last of a matrix
        wider = [size + (axis > 0 or tensor.dim() == 1) for axis, size in enumerate(shape)]
        return _with_gaps(tensor, wider, tuple(map(slice, shape)))
    if layout == "offset":  # dense, from the third element of a buffer: not aligned for
        # vectors, but at an even place, since torch may view two elements as one complex number
        row = _with_gaps(tensor.flatten(), (2 + tensor.numel(),), (slice(2, None),))
        return row.view(shape)
    if not deep(layout, shape) or (layout in TIED and not tensor.is_floating_point()):
        return tensor
    if layout == "swapped":
        return tensor.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "channels_last":
        return tensor.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout in TIED:
        axis = -1 if layout == "broadcast" else -2
        return tensor.narrow(axis, 0, 1).clone().expand(shape)
    gap = tensor.dim() - 2 if layout == "cut" else 1
    wider = [size + (axis == gap) for axis, size in enumerate(shape)]
    return _with_gaps(tensor, wider, tuple(map(slice, shape)))


def _with_gaps(tensor: torch.Tensor, shape: Sequence[int], index: tuple[Any, ...]) -> torch.Tensor:
    """The tensor at an index of a buffer, whose other elements are NaN, or 0 in integers."""
    gap = float("nan") if tensor.is_floating_point() else 0
    view = tensor.new_full(tuple(shape), gap)[index]
    return view.copy_(tensor)


def deep(layout: str, shape: Sequence[int]) -> bool:
    """Whether a tensor of this shape has the axes that a rare layout is about."""
    return min(shape, default=0) > 0 and len(shape) >= AXES.get(layout, 3)
