"""What rounding inside a computation can do to its result, where rounding its inputs shows nothing.

Terms may cancel exactly whatever the inputs are: the gradient of a layer norm over one element is
zero. A right kernel that rounds one of these terms gives the rounding instead.
"""

from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.utils._pytree import tree_map_only

from tinyllama.harness.machine.modes import DispatchMode

# Kernels compute in it, whatever the dtype of their tensors is.
UNIT = torch.finfo(torch.float32).eps


class RoundedSteps(DispatchMode):
    """While active, the result of each step in float64 is moved at random by up to half a ``unit``.

    Ops that torch can decompose, such as norms and losses, are taken apart into their steps.
    """

    def __init__(self, seed: int, unit: float = UNIT) -> None:
        super().__init__()
        self.unit = unit
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in decomposition_table:
            with self:
                return decomposition_table[func](*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if any(output.alias_info is not None for output in func._schema.returns):
            return result  # a view, or what was written in place
        return tree_map_only(torch.Tensor, self._moved, result)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is not torch.float64:
            return tensor
        device = tensor.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        half = torch.empty_like(tensor).uniform_(-0.5, 0.5, generator=self._generators[device])
        return tensor * (1 + self.unit * half)
