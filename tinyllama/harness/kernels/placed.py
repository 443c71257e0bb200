"""Where the backward pass writes gradients: into a buffer that its caller chose.

An op asks `place_for` where the gradients of some parameters belong, just before the first product
that writes there. It gets memory of its own, unless the parameters are views of a master for which
a buffer is offered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from tinyllama.harness.kernels.known import AFFECTING

_OFFERED: list[tuple[torch.Tensor, torch.Tensor, Callable[[], None]]] = []
AFFECTING.append(_OFFERED)


@contextlib.contextmanager
def placed(
    master: torch.Tensor, gradients: torch.Tensor, asked: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Meanwhile gradients of views of ``master`` belong into ``gradients``, element by element:
    both are flat, and master is the whole of its memory. Offer it for one backward pass, whose
    gradients are not added to others. asked: called each time that an op asks for a place there.
    """
    _OFFERED.append((master, gradients, asked))
    try:
        yield
    finally:
        _OFFERED.pop()


def place_for(view: torch.Tensor) -> torch.Tensor | None:
    """The memory for the gradient of a view of a master; None where none is offered."""
    for master, gradients, asked in _OFFERED:
        if view.untyped_storage().data_ptr() == master.untyped_storage().data_ptr():
            asked()
            return gradients.as_strided(view.shape, view.stride(), view.storage_offset())
    return None
