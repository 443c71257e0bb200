"""Gradients in memory that the other GPUs of a machine can read, summed by copies.

A collective of NCCL or RCCL occupies multiprocessors for as long as the links are busy, and a matrix
product beside it then runs in two waves. Here the copy engines move the data: each rank copies its
share of the others' gradients, adds them, and the sums are copied back. Only the addition and the
barriers are kernels. Memory and barriers are PyTorch's symmetric memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

SHARE = 64  # elements: shares are multiples of it, so that they are aligned


class PeerGradients:
    """The gradients of parameters, which are views of one buffer, at the same places of another
    buffer that all ranks read. All ranks make it together, and call `sum` in the same order.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], longest: int) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        self._parameters = list(parameters)
        one = self._parameters[0].detach()
        size = one.untyped_storage().nbytes() // one.element_size()
        group = dist.group.WORLD
        assert group is not None
        self.master = one.as_strided((size,), (1,), 0)
        self.flat = symmetric.empty(size, dtype=one.dtype, device=one.device)
        self.flat.zero_()
        self._memory: Any = symmetric.rendezvous(self.flat, group)
        ranks = range(self._memory.world_size)
        self._flats = [
            self.flat
            if rank == self._memory.rank
            else self._memory.get_buffer(rank, (size,), one.dtype)
            for rank in ranks
        ]
        share = -(-longest // len(ranks) // SHARE) * SHARE + SHARE
        self._others = one.new_empty((len(ranks) - 1, share))
        self.views = [
            self.flat.as_strided(p.shape, p.stride(), p.storage_offset()) for p in self._parameters
        ]
        torch.cuda.synchronize(one.device)
        dist.barrier()

    def keep(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of a parameter at its place: copied there unless it was written there."""
        view = self.views[index]
        if view.data_ptr() != gradient.data_ptr():
            view.copy_(gradient)
        return view

    def range_of(self, indices: Iterable[int]) -> tuple[int, int]:
        """From where to where these parameters lie, with what lies between them."""
        views = [self.views[index] for index in indices]
        start = min(view.storage_offset() for view in views)
        return start, max(view.storage_offset() + view.numel() for view in views)

    def sum(self, start: int, stop: int) -> None:
        """Sum a range over the ranks, on the current stream."""
        rank, count = self._memory.rank, len(self._flats)
        share = -(-(stop - start) // (count * SHARE)) * SHARE
        cuts = [min(start + i * share, stop) for i in range(count + 1)]
        mine = slice(cuts[rank], cuts[rank + 1])
        own = self.flat[mine]
        others = [other[: len(own)] for other in self._others]
        following = [(rank + step) % count for step in range(1, count)]
        self.barrier()  # the gradients of all are there
        for other, peer in zip(others, following, strict=True):
            other.copy_(self._flats[peer][mine], non_blocking=True)
        for other in others:
            own.add_(other)
        self.barrier()  # the sums of all are there, and nobody still reads what is replaced
        for peer in following:
            part = slice(cuts[peer], cuts[peer + 1])
            self.flat[part].copy_(self._flats[peer][part], non_blocking=True)

    def barrier(self) -> None:
        """Make the current stream of each rank wait for those of all."""
        self._memory.barrier()
