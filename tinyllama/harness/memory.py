"""Bytes of a device, a captured graph's own pool among them.

What a captured step allocates lies in a pool that belongs to its graph. The allocator counts
those blocks while it captures; afterwards they count as free although nobody else can have
them, so a captured step looks as if it had no activations.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence

import torch


def pool_bytes(graphs: Sequence[torch.cuda.CUDAGraph]) -> tuple[int, int]:
    """Bytes reserved by the pools of graphs, and how many of them count as allocated."""
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
    """Bytes of a GPU that are taken now: allocated ones, and the whole of each graph's pool."""
    reserved, counted = pool_bytes(graphs)
    return torch.cuda.memory_allocated(device) - counted + reserved


def peak_bytes(device: torch.device, graphs: Sequence[torch.cuda.CUDAGraph] = ()) -> int:
    """The most bytes taken since the last `forget_peak`, of a GPU.

    For a captured step the peak is forgotten before the capture, which allocates as a step does.
    """
    return max(torch.cuda.max_memory_allocated(device), live_bytes(device, graphs))


def forget_peak(device: torch.device) -> None:
    if device.type != "cpu":
        torch.cuda.reset_peak_memory_stats(device)


def resident_peak_bytes() -> int:
    """The most memory that this process has had; it never falls."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
