"""Accesses out of bounds, found by canaries around every buffer: inputs, outputs and scratch.

A store out of bounds changes a canary. A load is only seen where kernels are interpreted; it does
no harm unless the memory beyond a buffer is not mapped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tinyllama.harness.correct.checks.finding import Candidate, Problem
from tinyllama.harness.correct.checks.graph import Graph
from tinyllama.harness.correct.poison import UNINITIALISED
from tinyllama.harness.machine.device import synchronize

WIDTH = 2**16  # bytes of canary on each side of a buffer
CANARY = 0xA5


class OutOfBoundsError(AssertionError):
    """An access to memory that belongs to no tensor; it is refused."""


class KnownMemory(TorchDispatchMode):
    """While active, notes the memory of every tensor that an operator takes or returns. `watch`
    refuses any other access of an interpreted kernel, which could end the process.

    strays: the accesses that were refused.
    """

    def __init__(self) -> None:
        super().__init__()
        self.strays: list[str] = []
        self._known: dict[int, int] = {}  # first byte of a storage -> the byte behind its last
        self._sorted: tuple[Any, Any] | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves([result, args]):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                self._know(leaf.untyped_storage())
        return result

    def _know(self, storage: torch.UntypedStorage) -> None:
        start = storage.data_ptr()
        end = start + storage.nbytes()
        if self._known.get(start, 0) < end:
            self._known[start] = end
            self._sorted = None

    def watch(self, addresses: Any, accessed: Any, size: int, kind: str) -> None:
        """Raises OutOfBoundsError for an access to memory that belongs to no known tensor."""
        if self._sorted is None:
            starts = np.array(sorted(self._known), dtype=np.uint64)
            ends = np.array([self._known[int(start)] for start in starts], dtype=np.uint64)
            self._sorted = starts, np.maximum.accumulate(ends)
        starts, ends = self._sorted
        wanted = np.asarray(addresses)[np.broadcast_to(accessed, np.shape(addresses))]
        place = np.searchsorted(starts, wanted.astype(np.uint64), side="right") - 1
        inside = (place >= 0) & (wanted.astype(np.uint64) + np.uint64(size) <= ends[place])
        if not inside.all():
            text = f"a {kind} of {size} bytes from memory that is no tensor's"
            self.strays.append(text)
            raise OutOfBoundsError(text)


class GuardedMemory(KnownMemory):
    """While active, every uninitialised tensor that Python allocates lies between canaries."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers: list[tuple[torch.Tensor, int]] = []  # all bytes, how many are the tensor's

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        return self.guarded(result) if func in UNINITIALISED and result.numel() else result

    def guarded(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the same shape, strides and contents between canaries."""
        extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        size = extent * tensor.itemsize
        raw = torch.full((size + 2 * WIDTH,), CANARY, dtype=torch.uint8, device=tensor.device)
        self.buffers.append((raw, size))
        self._know(raw.untyped_storage())
        inside = raw[WIDTH : WIDTH + size].view(tensor.dtype)
        return inside.as_strided(tensor.shape, tensor.stride(), inside.storage_offset()).copy_(
            tensor
        )

    def watch(self, addresses: Any, accessed: Any, size: int, kind: str) -> None:
        """Note a load from a canary. Raises OutOfBoundsError as `KnownMemory` does."""
        super().watch(addresses, accessed, size, kind)
        for raw, length in self.buffers if kind == "load" else ():
            start = raw.data_ptr() + WIDTH
            near = (addresses >= start - WIDTH) & (addresses < start + length + WIDTH)
            inside = (addresses >= start) & (addresses + size <= start + length)
            if (near & ~inside & accessed).any():
                first = int(addresses[near & ~inside & accessed].min())
                self.strays.append(f"a load at byte {first - start} of a buffer of {length} bytes")

    def broken(self) -> list[str]:
        """Buffers whose canaries were read or overwritten, and where."""
        found = list(dict.fromkeys(self.strays))
        for raw, size in self.buffers:
            for side, canary in (("before", raw[:WIDTH]), ("after", raw[WIDTH + size :])):
                hit = (canary != CANARY).nonzero().flatten()
                if len(hit):
                    near = WIDTH - 1 - hit[-1] if side == "before" else hit[0]
                    found.append(f"a store {int(near)} bytes {side} a buffer of {size} bytes")
        return found


@contextlib.contextmanager
def watched(watch: Callable[..., None]) -> Iterator[None]:
    """Meanwhile, call a function for every access of an interpreted kernel."""
    from tinyllama.harness.kernels import interpreter

    interpreter.WATCHERS.append(watch)
    try:
        yield
    finally:
        interpreter.WATCHERS.remove(watch)


def out_of_bounds(candidate: Candidate) -> Problem:
    """No kernel accesses memory beyond its buffers, in any plain case, forward or backward."""
    candidate.smallest()  # raises where no case is covered: nothing would be checked
    for case in candidate.plain():
        guards = GuardedMemory()

        def guarded(value: Any, guards: GuardedMemory = guards) -> Any:
            if isinstance(value, list):
                return [guarded(item) for item in value]
            return guards.guarded(value)

        inputs = candidate.inputs(case)
        watching = watched(guards.watch) if candidate.interpreted else contextlib.nullcontext()
        try:
            with watching, guards:
                graph = Graph(candidate, inputs, prepare=guarded)
                if candidate.op.differentiable:
                    graph.gradients(guards.guarded)
                synchronize(candidate.device)
        except Exception:
            if not guards.strays:  # where there is one, it says more than the error it led to
                raise
        if broken := guards.broken():
            return case, broken[0] + (f", and {len(broken) - 1} more" if len(broken) > 1 else "")
    return None
