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
SUMS = {"sum", "mm", "bmm", "mv", "dot", "convolution", "cumsum"}  # of products of their inputs


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
        if func.overloadpacket.__name__ in SUMS:  # whose terms round, not only their sum
            squares = tree_map_only(torch.Tensor, torch.square, args)
            return self._moved(result, func(*squares, **(kwargs or {})).sqrt())
        return tree_map_only(torch.Tensor, lambda tensor: self._moved(tensor, tensor), result)

    def _moved(self, tensor: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        """Moved at random by up to half a unit of these sizes."""
        if tensor.dtype is not torch.float64:
            return tensor
        device = tensor.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        half = torch.empty_like(tensor).uniform_(-0.5, 0.5, generator=self._generators[device])
        return torch.where(size.isfinite(), tensor + self.unit * half * size, tensor)
