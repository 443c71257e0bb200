"""A provider's own forward and backward, called with arguments by their places."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from tinyllama.harness.declare.specs import Signature


@dataclass(frozen=True)
class Passes:
    """The passes of a provider that is a class; `tinyllama.harness.declare.autograd` says what each
    part means."""

    op: Signature
    name: str
    forward: Callable[..., Any]
    backward: Callable[..., Mapping[str, torch.Tensor | None]]
    keep: tuple[str, ...]
    saved: dict[str, Any]
    reads: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)
    replays: bool = False

    def as_read(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments with inputs in the layouts that the kernels read."""
        if not self.reads:
            return args
        read = list(args)
        for place, function in self._reads:
            read[place] = function(read[place])
        return tuple(read)

    @cached_property
    def _reads(self) -> list[tuple[int, Callable[[torch.Tensor], torch.Tensor]]]:
        """Where the inputs are that have to be in some layout, and what gives it."""
        names = list(self.op.inputs)
        return [(names.index(name), function) for name, function in self.reads.items()]

    def run_forward(self, *args: Any) -> tuple[torch.Tensor, ...]:
        inputs, params = self.split(args)
        results = several(self.forward(*inputs, **params))
        expected = len(self.op.outputs) + len(self.saved)
        if len(results) != expected:
            raise TypeError(
                f"{self.op.name}-{self.name}: forward returned {len(results)} tensors, "
                f"declared are {expected} (outputs, then saved)"
            )
        return results

    def run_backward(self, grads: Any, saved: Any, params: Any, needs_grad: Any) -> tuple[Any, ...]:
        needs = {name for name, wanted in zip(self.op.inputs, needs_grad, strict=False) if wanted}
        kept = dict(zip(self.keep, saved, strict=False))
        rest = dict(zip(self.saved, saved[len(self.keep) :], strict=True))
        named = dict(zip(self.op.params, params, strict=True))
        gradients = self.backward(grads, kept, rest, needs, **named)
        lost = [name for name in needs if gradients.get(name) is None]
        if lost:
            raise RuntimeError(
                f"{self.op.name}-{self.name}: backward returned no gradient for {sorted(lost)}"
            )
        return tuple(map(gradients.get, self.op.inputs))

    def split(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        n = len(self.op.inputs)
        return args[:n], dict(zip(self.op.params, args[n:], strict=True))

    def kept(self, inputs: tuple[Any, ...], results: tuple[Any, ...]) -> list[torch.Tensor]:
        """The tensors of ``keep``, among the inputs, and the outputs that come after them."""
        named = inputs + results
        return [named[place] for place in self._kept_places]

    @cached_property
    def without_elements(self) -> int:
        """How many saved tensors, the last ones, are read for their shape alone: of calls of one
        signature they are alike, so that a repeated one keeps none."""
        axes = [saved.axes for saved in self.saved.values()]
        having = [i for i, of in enumerate(axes, 1) if "0" not in of]
        return len(axes) - max(having, default=0) if self.replays else 0

    @cached_property
    def _kept_places(self) -> list[int]:
        """Where the kept tensors are among inputs and outputs."""
        names = (*self.op.inputs, *self.op.outputs)
        return [names.index(name) for name in self.keep]


def several(results: Any) -> tuple[torch.Tensor, ...]:
    """The results of an operator as a tuple, one alone too."""
    return results if isinstance(results, tuple) else (results,)
