"""What is known of calls of one signature of a provider, and how their passes are run: as they are
written, or repeated by a plan (`tinyllama.harness.kernels.plans`)."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch

from tinyllama.harness.declare.checked import BySignature
from tinyllama.harness.declare.custom_op import Passes
from tinyllama.harness.kernels.layout import memory_of
from tinyllama.harness.kernels.plans import Repeated

MOST_LAYOUTS = 64  # of gradients and saved tensors, in backward passes of one signature


def plain(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """Tensors whose memory has their values: one that stands for the negative of its memory, as the
    imaginary part of a conjugate does, is copied. Kernels read memory."""
    if any(isinstance(x, torch.Tensor) and x.is_neg() for x in tensors):
        return tuple(x.resolve_neg() if isinstance(x, torch.Tensor) else x for x in tensors)
    return tensors


def _no_view(result: torch.Tensor, inputs: tuple[Any, ...]) -> torch.Tensor:
    """A result that callers may change in place: torch refuses that for a view that the forward
    pass of an autograd function returns. One of an input stays what it is."""
    if not result._is_view():
        return result
    memories = {memory_of(x) for x in inputs if isinstance(x, torch.Tensor)}
    if memory_of(result) in memories:
        return result
    return torch.ops.aten._unsafe_view(result, result.shape)


class _Pass:
    """A forward or backward pass of one signature, as it is run."""

    def __init__(self, run: Callable[..., Any], replays: bool) -> None:
        self.run: Callable[..., Any] = run
        if replays:
            self.run = Repeated(run, functools.partial(setattr, self, "run"))


class Calls:
    """What is known of calls of one signature: their parameters, and how their passes are run."""

    def __init__(self, derived: Passes, params: dict[str, Any]) -> None:
        self._derived, self._params = derived, tuple(params.values())
        self._right = False  # whether inputs come in the layouts that the kernels read
        self._empty: tuple[torch.Tensor, ...] = ()  # what is saved without elements
        self.forward = _Pass(self._run_forward, derived.replays)
        self._backward: dict[tuple[bool, ...], BySignature[_Pass]] = {}

    def as_read(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inputs in the layouts that the kernels read, found once where calls are repeated."""
        if self._right:
            return inputs
        read = self._derived.as_read(inputs)
        self._right = self._derived.replays and all(map(operator.is_, inputs, read))
        return read

    def _run_forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        returned = self._derived.run_forward(*inputs, *self._params)
        results = tuple(_no_view(result, inputs) for result in returned)
        n = len(results) - self._derived.without_elements
        self._empty = results[n:]
        return results[:n]

    def backward(self, needs: tuple[bool, ...], tensors: tuple[torch.Tensor | None, ...]) -> Any:
        """Gradients of the inputs, and None. tensors: upstream gradients, then what was saved."""
        if not self._derived.replays:
            return self._run_backward(needs, *plain(tensors))
        passes = self._backward.get(needs)
        if passes is None:
            passes = self._backward[needs] = BySignature(MOST_LAYOUTS)
        backward = passes.last(tensors, {})
        if backward is None:
            tensors = plain(tensors)
            backward = passes.find(tensors, {})
        if backward is None:
            backward = _Pass(functools.partial(self._run_backward, needs), replays=True)
            passes.put(tensors, {}, backward)
        return backward.run(*tensors)

    def _run_backward(self, needs: tuple[bool, ...], *tensors: torch.Tensor | None) -> Any:
        n_grads = len(self._derived.op.outputs)
        grads, saved = tensors[:n_grads], (*tensors[n_grads:], *self._empty)
        return (*self._derived.run_backward(grads, saved, self._params, needs), None)
