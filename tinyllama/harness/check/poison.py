"""Fresh memory filled with NaN, so that an element that a kernel does not write is seen.

As in flash-linear-attention's test configuration: memory that happens to hold zeros, or the right
result of the previous call, hides a tail that is never written.
"""

from typing import Any

import torch

from tinyllama.harness.machine.modes import DispatchMode

UNINITIALISED = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}


class PoisonedMemory(DispatchMode):
    """While active, every uninitialised tensor that Python allocates holds NaN (or the largest
    value of an integral dtype); with ``clean``, zeros."""

    supports_higher_order_operators = True  # as launches by ``torch.library.wrap_triton`` are

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
