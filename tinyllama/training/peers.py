"""Gradients in memory that all GPUs of a machine can read, summed by copies between them.

A collective of NCCL or RCCL occupies multiprocessors for as long as the links are busy, and a
product beside it then runs in two waves. Here the copy engines move the data: each rank copies its
share of the others' gradients and adds them, and the others copy the sums. Only the additions and
the barriers are kernels. The memory and the barriers are PyTorch's symmetric memory.
"""

import itertools
import os
import socket
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from tinyllama.harness.kernels.streams import Side
from tinyllama.training.ranks import Ranks

ALIGNMENT = 64  # elements, of which shares are multiples


def cannot_copy(device: torch.device, ranks: Ranks) -> str | None:
    """Why gradients cannot be summed by copies; None where they can. All ranks call it together
    and get the same answer, which is that of the first rank that has one.
    """
    hosts = len(set(ranks.gathered(socket.gethostname())))
    if hosts > 1:
        return f"the ranks are on {hosts} machines"
    return _first(ranks, _no_access(device, ranks)) or _first(ranks, _no_copy(device, ranks))


def _first(ranks: Ranks, reason: str | None) -> str | None:
    return next((each for each in ranks.gathered(reason) if each is not None), None)


def _no_access(device: torch.device, ranks: Ranks) -> str | None:
    if device.type == "cpu":
        return "ranks on CPUs have gloo"
    for other in range(ranks.count):
        if other != device.index and not torch.cuda.can_device_access_peer(device, other):
            return f"{device} cannot access the memory of GPU {other}"
    return None


def _no_copy(device: torch.device, ranks: Ranks) -> str | None:
    """Try it: each rank reads the number of every other one."""
    try:
        mine, memory = _connected(torch.empty(ALIGNMENT, device=device))
        mine.fill_(ranks.rank)
        memory.barrier()
        others = [memory.get_buffer(r, mine.shape, mine.dtype) for r in range(ranks.count)]
        read = [other.clone().unique().tolist() for other in others]
        memory.barrier()
    except (ImportError, RuntimeError) as error:
        return f"PyTorch has no symmetric memory here: {f'{error}'.splitlines()[0]:.200}"
    right = [[float(rank)] for rank in range(ranks.count)]
    return None if read == right else f"{device} reads {read} in the others' memory, not {right}"


def _connected(like: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Zeros as large as a flat tensor, which all ranks can read, and the way to them."""
    # Multicast needs resources of the whole NVSwitch, and copies have no use for it.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    from torch.distributed import _symmetric_memory as symmetric

    group = dist.group.WORLD
    assert group is not None
    memory = symmetric.empty(like.numel(), dtype=like.dtype, device=like.device)
    memory.zero_()
    return memory, symmetric.rendezvous(memory, group)


class PeerGradients:
    """The gradients of parameters, which are views of one memory, at the same places of another
    one that all ranks can read. All ranks make it together, and sum in the same order.

    master: the memory of the parameters, flat; gradients: that of their gradients. views: the
    gradients by the index of their parameter.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], groups: Iterable[Iterable[int]], ranks: Ranks
    ) -> None:
        """groups: what is summed together, by index; the memory between must be of no other."""
        given = list(parameters)
        one = given[0].detach()
        size = one.untyped_storage().nbytes() // one.element_size()
        self.master = one.as_strided((size,), (1,), 0)
        self.gradients, self._memory = _connected(self.master)
        self._rank, self._count = ranks.rank, ranks.count
        self._patience = int(1000 * ranks.seconds)
        self.views = [
            self.gradients.as_strided(p.shape, p.stride(), p.storage_offset()) for p in given
        ]
        self._side = Side(one.device, urgent=True)
        self._of_all = [
            self._memory.get_buffer(rank, (size,), one.dtype)
            if rank != self._rank
            else self.gradients
            for rank in range(self._count)
        ]
        longest = max(stop - start for start, stop in map(self._range, groups))
        self._others = one.new_empty((self._count - 1, self._share(longest)))

    @torch.no_grad()
    def sum(self, gradients: Mapping[int, torch.Tensor]) -> torch.cuda.Event | None:
        """Sum the gradients of a group over the ranks, on the side, behind all that was launched
        so far, into `views`; `wait` for what this returns before they are read. Gradients that
        were not written there are copied there first."""
        apart = [i for i, each in gradients.items() if each.data_ptr() != self.views[i].data_ptr()]
        if apart:
            torch._foreach_copy_([self.views[i] for i in apart], [gradients[i] for i in apart])
        with self._side.branch():
            self._sum(*self._range(gradients))
        return self._side.mark()

    def wait(self, point: torch.cuda.Event | None) -> None:
        self._side.wait(point)

    def finish(self) -> None:
        """Wait until all sums are there, on all ranks: gradients may be written again."""
        with self._side.branch():
            self._barrier()
        self._side.join()

    def _range(self, indices: Iterable[int]) -> tuple[int, int]:
        ends = [(int(v.storage_offset()), v.numel()) for v in (self.views[i] for i in indices)]
        return min(start for start, _ in ends), max(start + length for start, length in ends)

    def _share(self, length: int) -> int:
        return -(-length // (self._count * ALIGNMENT)) * ALIGNMENT

    def _sum(self, start: int, stop: int) -> None:
        share = self._share(stop - start)
        cuts = [min(start + i * share, stop) for i in range(self._count + 1)]
        parts = [slice(*ends) for ends in itertools.pairwise(cuts)]
        mine = parts[self._rank]
        own = self.gradients[mine]
        others = [other[: len(own)] for other in self._others]
        # Each rank starts with the next one, so that no link has several copies at a time.
        peers = [(self._rank + step) % self._count for step in range(1, self._count)]
        self._barrier()  # all gradients are there
        for other, peer in zip(others, peers, strict=True):
            other.copy_(self._of_all[peer][mine], non_blocking=True)
        for other in others:
            own.add_(other)
        self._barrier()  # all sums are there, and what they replace was read
        for peer in peers:
            self.gradients[parts[peer]].copy_(self._of_all[peer][parts[peer]], non_blocking=True)

    def _barrier(self) -> None:
        """Make this stream wait for those of all ranks; a kernel that waits too long fails."""
        self._memory.barrier(timeout_ms=self._patience)
