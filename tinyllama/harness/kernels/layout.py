"""Contiguity at the boundary: the one place where a kernel's input is copied, and counted."""

import itertools
from collections.abc import Sequence

import torch

from tinyllama.harness.kernels.copying import dense_copy

MOST_BETWEEN = 64  # elements between tensors that share a memory, on average
copies = 0  # made by `contiguous` so far; a test reads it before and after


def contiguous(x: torch.Tensor) -> torch.Tensor:
    """x itself where its memory is dense and in order, else a copy that is, outside autograd;
    copies count."""
    global copies
    if x.is_contiguous():
        return x
    copies += 1
    return dense_copy(x)


def as_one(*tensors: torch.Tensor) -> torch.Tensor | None:
    """The tensors as one flat view, where they lie side by side in memory in this order; None
    where they do not. The view is outside autograd."""
    first = tensors[0]
    end = first.storage_offset()
    for tensor in tensors:
        follows = tensor.storage_offset() == end and _same_storage(tensor, first)
        if not (follows and tensor.is_contiguous() and tensor.dtype is first.dtype):
            return None
        end += tensor.numel()
    start = first.storage_offset()
    return first.detach().as_strided((end - start,), (1,), start)


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensors' elements one after the other, flat: a view where they lie so, else a copy,
    which counts."""
    global copies
    view = as_one(*tensors)
    if view is not None:
        return view
    copies += 1
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors of one shape and dtype as one with an axis in front: a view where they lie equally
    far apart in memory, else a copy, which counts. It is outside autograd."""
    global copies
    first = tensors[0].detach()
    starts = [tensor.storage_offset() for tensor in tensors]
    step = starts[1] - starts[0] if len(starts) > 1 else first.numel()
    evenly = step > 0 and starts == [starts[0] + i * step for i in range(len(starts))]
    alike = all(_same_storage(x, first) and x.stride() == first.stride() for x in tensors)
    if evenly and alike:
        return first.as_strided((len(tensors), *first.shape), (step, *first.stride()), starts[0])
    copies += 1
    return torch.stack([tensor.detach() for tensor in tensors])


def _same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def placed_alike(
    tensors: Sequence[torch.Tensor], dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Zeros of the tensors' shapes, dense: where the tensors fill a part of one memory, so do the
    zeros, in the same order and at the same distances. dtype: None for that of the first tensor."""
    first = tensors[0].detach()
    start = min(x.storage_offset() for x in tensors)
    size = max(x.storage_offset() + x.numel() for x in tensors) - start
    dense = all(_same_storage(x, first) and x.is_contiguous() for x in tensors)
    if not dense or size > sum(x.numel() + MOST_BETWEEN for x in tensors):
        return [torch.zeros_like(x, dtype=dtype) for x in tensors]
    buffer = torch.zeros(size, dtype=dtype or first.dtype, device=first.device)
    offsets = [x.storage_offset() - start for x in tensors]
    pairs = zip(tensors, offsets, strict=True)
    return [buffer[at : at + x.numel()].view(x.shape) for x, at in pairs]


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x (... D), contiguous or of `even_rows`, as one matrix (N D): a view. A vector is one row."""
    return x.flatten(0, -2) if x.dim() > 1 else x[None]


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """x itself where its last axis is dense, whatever its other strides; else a copy, which
    counts. For kernels that take the strides of the other axes."""
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 else contiguous(x)


def dense_matrices(x: torch.Tensor) -> torch.Tensor:
    """x (N rows columns) itself where each of the N matrices is dense, however far apart they are;
    else a copy, which counts."""
    return x if not len(x) or x[0].is_contiguous() else contiguous(x)


def even_rows(x: torch.Tensor) -> torch.Tensor:
    """x (... D) itself where its rows are dense and equally far apart, so that `as_rows` is a view;
    else a copy, which counts."""
    if x.dim() < 2:
        return contiguous(x)
    if x.is_contiguous():
        return x
    axes = [axis for axis in zip(x.shape[:-1], x.stride()[:-1], strict=True) if axis[0] != 1]
    even = all(a[1] == b[0] * b[1] for a, b in itertools.pairwise(axes))
    return dense_rows(x) if even else contiguous(x)


def memory_of(tensor: torch.Tensor) -> int:
    """What names a tensor's storage: equal for tensors, such as views, that share it."""
    return int(tensor.untyped_storage()._cdata)
