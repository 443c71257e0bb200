"""How the matrices of the blocks of a `stack` lie in memory, and their copies and gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tinyllama.harness.kernels.layout import as_one
from tinyllama.harness.kernels.parameter_memory import kept_transposed, rounded
from tinyllama.ops.block.matrices import Matrices
from tinyllama.ops.block.passes import WEIGHTS
from tinyllama.ops.transpose import transposed


def gradients_of(weights: list[torch.Tensor]) -> torch.Tensor:
    """Memory for the gradients of the weights (L P), those of a block side by side."""
    size = sum(w.shape[1:].numel() for w in weights)
    return weights[0].new_empty((len(weights[0]), size))


def split(weights: list[torch.Tensor], flat_LP: torch.Tensor) -> dict[str, torch.Tensor]:
    """Views of the weights' shapes in a buffer that has those of a block side by side."""
    parts = flat_LP.split([w.shape[1:].numel() for w in weights], 1)
    shapes = (w.shape[1:] for w in weights)
    matrices = (part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True))
    return dict(zip(WEIGHTS, matrices, strict=True))


def views(weights: list[torch.Tensor], flat_LP: torch.Tensor) -> list[Matrices]:
    """The matrices of each block in a buffer that has all seven side by side."""
    return [Matrices.of([w[i] for w in weights], flat_LP[i]) for i in range(len(flat_LP))]


def _one_span(weights: list[torch.Tensor]) -> torch.Tensor | None:
    """All seven matrices of each block (L P), flat: a view; None where they do not lie so."""
    span = as_one(*(w[0] for w in weights)) if len(weights[0]) else None
    if span is None or len({w.stride(0) for w in weights}) > 1:
        return None
    shape, strides = (len(weights[0]), span.numel()), (weights[0].stride(0), 1)
    return span.as_strided(shape, strides, span.storage_offset())


def turned_copy(weights: list[torch.Tensor]) -> torch.Tensor:
    """The transposes of each block's matrices where they are kept (L P), else nothing (0)."""
    span = _one_span(weights)
    copy = None if span is None else kept_transposed.of(span)
    return weights[0].new_empty(0) if copy is None else copy


def transposes_of(matrices: list[Matrices], copy_LP: torch.Tensor) -> list[Callable[[], Matrices]]:
    """For each block a function that gives the transposes of its matrices: views of the copy, or
    made where that is empty."""
    return [
        partial(_transpose, of_block, copy_LP[i] if copy_LP.numel() else None)
        for i, of_block in enumerate(matrices)
    ]


def _transpose(matrices: Matrices, flat: torch.Tensor | None) -> Matrices:
    stored = matrices.qkv, matrices.out, matrices.gate_up, matrices.down
    if flat is None:
        return Matrices(*map(transposed, stored))
    parts = flat.split([w.numel() for w in stored])
    return Matrices(*(part.view(w.T.shape) for part, w in zip(parts, stored, strict=True)))


def where_they_lie(weights: list[torch.Tensor]) -> list[Matrices]:
    return [Matrices.of([w[i] for w in weights], None) for i in range(len(weights[0]))]


def narrowed(
    weights: list[torch.Tensor], dtype: torch.dtype
) -> tuple[torch.Tensor, list[Matrices]]:
    """The weights in the dtype of the products (L P; empty where that is their own), and the
    matrices made of them."""
    if dtype is weights[0].dtype:
        return weights[0].new_empty(0), where_they_lie(weights)
    wide = _one_span(weights)
    if wide is not None:
        narrow = rounded.of(wide, dtype)
        narrow = wide.to(dtype) if narrow is None else narrow
    else:
        narrow = torch.cat([w.detach().flatten(1).to(dtype) for w in weights], 1)
    return narrow, views(weights, narrow)
