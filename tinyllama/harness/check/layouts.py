"""Memory layouts in which inputs and upstream gradients are tried."""

from collections.abc import Sequence

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
# Which change values; the others only say where they lie.
REPEATING = ("expanded", "summed", "broadcast", "shared", FAINT)


def laid_out(
    sample: torch.Tensor, dtype: torch.dtype, device: torch.device | str, layout: str, place: int
) -> torch.Tensor:
    """The sample on a device, in the given layout; ``place``: its number among the call's
    tensors."""
    tensor = sample.to(dtype=dtype, device=device)
    if layout == "contiguous" or tensor.dim() == 0:
        return tensor.contiguous()
    gap = float("nan") if tensor.is_floating_point() else 0
    if layout == "strided":  # every second element of the last axis
        buffer = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1]), gap)
        view = buffer[..., ::2]
        view.copy_(tensor)
        return view
    if layout == "offset":  # dense, from the third element of a buffer: not aligned for
        # vectors, but at an even place, since torch may view two elements as one complex number
        view = tensor.new_full((2 + tensor.numel(),), gap)[2:].view(tensor.shape)
        view.copy_(tensor)
        return view
    if layout == "padded":  # dense rows with a gap behind each, and one behind the last of a matrix
        wider = [size + (1 if axis else 0) for axis, size in enumerate(tensor.shape)]
        wider = wider if tensor.dim() > 1 else [tensor.numel() + 1]
        view = tensor.new_full(wider, gap)[tuple(slice(size) for size in tensor.shape)]
        view.copy_(tensor)
        return view
    if layout == "distinct":  # elements and rows as far apart as in no other tensor of the call
        width = place * (tensor.shape[-1] + 1)
        view = tensor.new_full((*tensor.shape[:-1], width), gap)[..., :-place:place]
        view.copy_(tensor)
        return view
    if layout == "transposed":  # the memory order of the axes reversed
        order = tuple(reversed(range(tensor.dim())))
        return tensor.permute(order).contiguous().permute(order)
    if layout == "expanded":  # one row for the whole first axis
        return tensor[:1].clone().expand(tensor.shape) if tensor.dim() > 1 else tensor
    if layout == "summed":  # one element for the whole tensor
        return tensor.flatten()[:1].clone().expand(tensor.shape)
    if layout == "swapped":
        return (
            tensor.transpose(-3, -2).contiguous().transpose(-3, -2)
            if deep(layout, tensor.shape)
            else tensor
        )
    if layout == "channels_last":
        if not deep(layout, tensor.shape):
            return tensor
        return tensor.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout == SINGLE:
        dense = tensor.contiguous()
        strides = [
            stride if size > 1 else 1 if axis == 0 else tensor.numel() + stride
            for axis, (size, stride) in enumerate(zip(dense.shape, dense.stride(), strict=True))
        ]
        return dense.as_strided(dense.shape, strides)
    if layout in ("cut", "parted"):
        if not deep(layout, tensor.shape):
            return tensor
        axis = -2 if layout == "cut" else 1
        view = torch.cat((tensor, torch.full_like(tensor.narrow(axis, 0, 1), gap)), axis)
        return view.narrow(axis, 0, tensor.shape[axis])
    if layout in ("broadcast", "shared"):  # one element for the last axis; one row for that before
        if not (tensor.is_floating_point() and deep(layout, tensor.shape)):
            return tensor
        axis = -1 if layout == "broadcast" else -2
        return tensor.narrow(axis, 0, 1).clone().expand(tensor.shape)
    if layout == FAINT:
        return (tensor.double() * FAINTNESS.get(dtype, 2.0**-40)).to(dtype)
    names = dict.fromkeys((*LAYOUTS, *UPSTREAMS, *RARE, SINGLE, FAINT))
    raise ValueError(f"unknown layout {layout!r}: use one of {', '.join(names)}")


def deep(layout: str, shape: Sequence[int]) -> bool:
    """Whether a tensor of this shape has the axes that a rare layout is about."""
    return min(shape, default=0) > 0 and len(shape) >= AXES.get(layout, 3)
