"""Memory in the layout of the parameters: their rounded copies and their transposes.

A caller offers it for a while, beside the master: the one memory of all parameters. An op asks with
a view of the master, and gets the offered memory at the same place.
"""

import contextlib

import torch

from tinyllama.harness.kernels.launch_cache import AFFECTING, among


class Offered:
    """Memories of one kind."""

    def __init__(self) -> None:
        self._offers: list[tuple[torch.Tensor, torch.Tensor]] = []
        AFFECTING.append(self._offers)

    def __call__(
        self, master: torch.Tensor, memory: torch.Tensor
    ) -> contextlib.AbstractContextManager[object]:
        """In this context each element of ``memory`` belongs to the same element of ``master``.
        Both are flat, and master is the whole of its memory."""
        return among(self._offers, (master, memory))

    def of(self, view: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """The memory at the place of a view of a master; None where none is offered, or none in
        this dtype (None: any)."""
        for master, memory in self._offers:
            here = view.untyped_storage().data_ptr() == master.untyped_storage().data_ptr()
            if here and view.dtype is master.dtype and dtype in (None, memory.dtype):
                return memory.as_strided(view.shape, view.stride(), view.storage_offset())
        return None


# Copies in the dtype of products.
rounded = Offered()
# The transpose of each matrix, at the matrix's place: ask with views of whole matrices.
kept_transposed = Offered()
