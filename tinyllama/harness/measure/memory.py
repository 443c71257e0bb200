"""Bytes of a GPU in use, pools of captured graphs included, and bytes of tensors on any device.

What a captured step allocates is in a pool that belongs to its graph. The allocator counts those
blocks as allocated during the capture and as free afterwards, although nobody else can use them: a
captured step then seems to have no activations.
"""

import resource
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from tinyllama.harness.machine.modes import DispatchMode


def pool_bytes(graphs: Sequence[torch.cuda.CUDAGraph]) -> tuple[int, int]:
    """Bytes reserved by the pools of graphs, and how many of those count as allocated."""
    pools = {tuple(graph.pool()) for graph in graphs}
    if not pools:
        return 0, 0
    segments = [
        segment
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) in pools
    ]
    return (
        sum(segment["total_size"] for segment in segments),
        sum(segment["allocated_size"] for segment in segments),
    )


def live_bytes(device: torch.device, graphs: Sequence[torch.cuda.CUDAGraph] = ()) -> int:
    """Bytes of a GPU in use now: those allocated, and the whole pool of each graph."""
    reserved, counted = pool_bytes(graphs)
    return torch.cuda.memory_allocated(device) - counted + reserved


def peak_bytes(device: torch.device, graphs: Sequence[torch.cuda.CUDAGraph] = ()) -> int:
    """The most bytes of a GPU in use since the last `forget_peak`.

    For a captured step, forget the peak before the capture, which allocates as a step does.
    """
    return max(torch.cuda.max_memory_allocated(device), live_bytes(device, graphs))


def forget_peak(device: torch.device) -> None:
    if device.type != "cpu":
        torch.cuda.reset_peak_memory_stats(device)


def resident_peak_bytes() -> int:
    """The most resident memory that this process has had; it never falls."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Allocations(DispatchMode):
    """Bytes of the tensors that are made while this is active; for devices without statistics.

    It sees the tensors that operators return, in the backward pass too, and when nothing holds one
    any more, autograd graphs included. It does not see what an operator allocates and frees inside,
    nor tensors of other libraries.

    total, largest: of all that were made. live: of those that still exist, also after this is no
    longer active. peak: the most that existed at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = self.largest = self.peak = 0
        # Torch's own weak references: torch makes the Python object of a storage anew when asked.
        self._there: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # No operator returns a tensor made of Python numbers; this one gets it as its argument.
        made_before = [] if func is torch.ops.aten.lift_fresh.default else [args, kwargs]
        before = {storage._cdata for storage in _storages(made_before)}
        new = {s._cdata: s for s in _storages(result) if s._cdata not in before}
        for key, storage in new.items():
            if key not in self._there:
                self.total += storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
                self._there[key] = StorageWeakRef(storage), storage.nbytes()
        if new:
            self.peak = max(self.peak, self.live)
        return result

    @property
    def live(self) -> int:
        gone = [key for key, (reference, _) in self._there.items() if reference.expired()]
        for key in gone:
            del self._there[key]
        return sum(size for _, size in self._there.values())


def _storages(values: Any) -> list[torch.UntypedStorage]:
    """The memory of all tensors in a structure."""
    storages = []
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            storages.append(leaf.untyped_storage())
        elif isinstance(leaf, torch.UntypedStorage):
            storages.append(leaf)
    return storages
