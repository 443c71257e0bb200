"""Memory that shows what is done to it: filled with NaN, and between canaries.

Fresh memory that happens to hold zeros, or the right result of the previous call, hides a tail that
is never written: so it is filled with NaN, as in flash-linear-attention's test configuration.
Inputs, upstream gradients, outputs and scratch lie between canaries, which a store out of bounds
changes. Where kernels are interpreted, loads and stores out of bounds are noted before they are
made (`tinyllama.harness.kernels.bounds`), and left out.
"""

from typing import Any

import torch

from tinyllama.harness.kernels.bounds import Bounds
from tinyllama.harness.machine.modes import DispatchMode

WIDTH = 2**16  # bytes of canary on each side of a buffer
CANARY = 0xA5
ALIGNED = 16  # bytes of the widest access
UNINITIALISED = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}


class GuardedMemory(DispatchMode, Bounds):
    """While active, every uninitialised tensor that Python allocates lies between canaries."""

    def __init__(self) -> None:
        DispatchMode.__init__(self)
        Bounds.__init__(self)
        # All bytes, where its own begin and end, what it is.
        self.buffers: list[tuple[torch.Tensor, int, int, str]] = []
        self._new: set[int] = set()  # storages of those that the caller allocated
        self.forward: list[str] | None = None  # kernels that were launched before the backward pass

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.as_strided.default and len(args) == 4 and args[3] is not None:
            args = (*args[:3], self._behind_canary(args[0], args[3]))
        result = func(*args, **(kwargs or {}))
        if func not in UNINITIALISED or not result.numel() or result.is_meta:
            return result
        buffer = self.guarded(result)
        self._new.add(buffer.untyped_storage().data_ptr())
        return buffer

    def _behind_canary(self, tensor: torch.Tensor, offset: int) -> int:
        """An offset in a buffer, where it is one in new memory that begins where its storage does:
        autograd's backward pass of an assignment to a slice expects that."""
        first = tensor.untyped_storage().data_ptr()
        if first not in self._new:
            return offset
        canary = (self.inside[first][0] - first) // tensor.itemsize
        return offset + canary if offset < canary else offset

    def guarded(self, tensor: torch.Tensor, name: str = "") -> torch.Tensor:
        """A tensor of the same shape, strides and contents between canaries, gaps included, and as
        far behind a multiple of ``ALIGNED`` bytes."""
        if not tensor.numel():
            return tensor.detach().clone()
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        extent = 1 + sum((n - 1) * s for n, s in pairs)
        size = extent * tensor.itemsize
        first = WIDTH + tensor.data_ptr() % ALIGNED
        raw = torch.full((first + size + WIDTH,), CANARY, dtype=torch.uint8, device=tensor.device)
        self.buffers.append((raw, first, first + size, name))
        start = raw.data_ptr() + first
        self.inside[raw.data_ptr()] = start, start + size
        inside = raw[first : first + size].view(tensor.dtype)
        inside.copy_(tensor.detach().as_strided((extent,), (1,), tensor.storage_offset()))
        return inside.as_strided(tensor.shape, tensor.stride(), inside.storage_offset())

    def placed(self, value: Any, name: str = "") -> Any:
        """An input between canaries; of a list, each entry."""
        if name.startswith("grad ") and self.forward is None:
            self.forward = list(self.kernels)
        if isinstance(value, list):
            return [self.placed(entry, f"{name}[{i}]") for i, entry in enumerate(value)]
        return None if value is None else self.guarded(value, name)

    def launched(self, backward: bool) -> str:
        """``; kernels: ...``, those of the forward pass or those that the backward pass added, each
        with its line; "" where there are none."""
        forward = list(self.kernels) if self.forward is None else self.forward
        names = [name for name in self.kernels if (name not in forward) == backward] or forward
        kernels = ", ".join(f"{name} ({self.kernels[name]})" for name in names)
        return f"; kernels: {kernels}" if kernels else ""

    def broken(self) -> list[str]:
        """What was accessed out of bounds, and buffers whose canaries were overwritten, and where.

        The canaries are put back: what is said once is not said again.
        """
        faults, self.out_of_bounds = self.out_of_bounds, []
        for raw, first, end, name in self.buffers:
            for side, canary in (("before", raw[:first]), ("after", raw[end:])):
                hit = (canary != CANARY).nonzero().flatten()
                if len(hit):
                    near = first - 1 - hit[-1] if side == "before" else hit[0]
                    what = f"{name}, a buffer" if name else "a buffer"
                    faults.append(f"a store {int(near)} bytes {side} {what} of {end - first} bytes")
                    canary.fill_(CANARY)
        return faults


class PoisonedMemory(DispatchMode):
    """While active, every uninitialised tensor that Python allocates holds NaN (or the largest
    value of an integral dtype); with ``clean``, zeros."""

    def __init__(self, *, clean: bool = False) -> None:
        super().__init__()
        self.clean = clean

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in UNINITIALISED and result.numel():
            if self.clean:
                result.zero_()
            elif result.dtype.is_floating_point or result.dtype.is_complex:
                result.fill_(float("nan"))
            elif result.dtype is not torch.bool:
                result.fill_(torch.iinfo(result.dtype).max)
        return result
