"""Stores out of bounds, seen in canaries around every buffer: inputs, outputs and scratch."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tinyllama.harness.checks.finding import Candidate, Problem
from tinyllama.harness.checks.graph import Graph
from tinyllama.harness.device import synchronize
from tinyllama.harness.poison import UNINITIALISED

WIDTH = 2**16  # bytes of canary on each side of a buffer
CANARY = 0xA5


class GuardedMemory(TorchDispatchMode):
    """While active, every uninitialised tensor asked for in Python lies between canaries."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers: list[tuple[torch.Tensor, int]] = []  # all bytes, how many are the tensor's

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return self.guarded(result) if func in UNINITIALISED and result.numel() else result

    def guarded(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the same shape, strides and contents between canaries."""
        extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        size = extent * tensor.itemsize
        raw = torch.full((size + 2 * WIDTH,), CANARY, dtype=torch.uint8, device=tensor.device)
        self.buffers.append((raw, size))
        inside = raw[WIDTH : WIDTH + size].view(tensor.dtype)
        return inside.as_strided(tensor.shape, tensor.stride(), inside.storage_offset()).copy_(
            tensor
        )

    def broken(self) -> list[str]:
        """Buffers whose canaries were overwritten, and where."""
        found = []
        for raw, size in self.buffers:
            for side, canary in (("before", raw[:WIDTH]), ("after", raw[WIDTH + size :])):
                hit = (canary != CANARY).nonzero().flatten()
                if len(hit):
                    near = WIDTH - 1 - hit[-1] if side == "before" else hit[0]
                    found.append(f"{int(near)} bytes {side} a buffer of {size} bytes")
        return found


def out_of_bounds(candidate: Candidate) -> Problem:
    """No kernel writes beyond its buffers, in any plain case, forward or backward."""
    for case in candidate.plain():
        guards = GuardedMemory()

        def guarded(value: Any, guards: GuardedMemory = guards) -> Any:
            if isinstance(value, list):
                return [guarded(item) for item in value]
            return guards.guarded(value)

        graph = Graph(candidate, candidate.inputs(case), prepare=guarded, within=guards)
        if candidate.op.differentiable:
            with guards:
                graph.gradients(guards.guarded)
        synchronize(candidate.device)
        if broken := guards.broken():
            return case, f"a store {broken[0]}" + (
                f", and {len(broken) - 1} more" * (len(broken) > 1)
            )
    return None
