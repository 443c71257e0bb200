"""Bytes of a training step by category, at its peak."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from tinyllama.harness.measure.memory import Allocations
from tinyllama.training.step import TrainStep


class _Peak(Allocations):
    """The moment at which the tensors made in a step have the most bytes: the phase, those bytes,
    and the bytes of gradients among them."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        super().__init__()
        self.parameters = parameters
        self.updating = False
        self.phase, self.bytes, self.gradients = "forward", 0, 0

    def begin_update(self, *_: Any) -> None:
        """Note that what runs from now on is the update."""
        self.updating = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.live > self.bytes:
            backward = torch._C._current_graph_task_id() >= 0
            self.phase = "update" if self.updating else "backward" if backward else "forward"
            self.bytes = self.live
            self.gradients = min(self.live, _bytes(p.grad for p in self.parameters))
        return result


def _bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """The bytes of the memory behind tensors; views of one buffer count once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors if t is not None}
    return sum(storage.nbytes() for storage in storages.values())


def observe(step: TrainStep, run_step: Callable[[], None]) -> dict[str, Any]:
    """The bytes of each category at the peak, and the phase in which that is.

    Activations are all other tensors that the step makes, temporaries included. What one operator
    allocates and frees inside is not seen, nor what kernels use that allocate by themselves.
    """
    step.optimizer.zero_grad(set_to_none=True)
    peak = _Peak(step.optimizer.parameters)
    mark = step.optimizer.register_step_pre_hook(peak.begin_update)
    try:
        with peak:
            run_step()
    finally:
        mark.remove()
    at_peak = {
        "parameters": _bytes(step.model.parameters()),
        "optimizer states": _bytes(step.optimizer.tensors().values()),
        "gradients": peak.gradients,
        "activations": peak.bytes - peak.gradients,
    }
    return {
        "plan": str(step.plan),
        "peak_bytes": sum(at_peak.values()),
        "peak_phase": peak.phase,
        "at_peak_bytes": at_peak,
    }
