"""One forward call of a candidate, whose gradients can be computed any number of times."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tinyllama.harness.check.evaluate import GradientError, Inputs, Leaves, Raised, copied
from tinyllama.harness.check.finding import Candidate
from tinyllama.harness.declare.autograd import several


def outputs_of(candidate: Candidate, args: Leaves, params: Mapping[str, Any]) -> tuple[Any, ...]:
    with Raised.in_call(candidate.op, candidate.provider.call):
        return several(candidate.provider.call(*args.values(), **params))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal in every element; NaN equals NaN."""
    if one.shape != other.shape:
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


class Graph:
    """outputs: by name; upstream: the gradients that some of them get; args: the call's inputs.

    prepare: makes the argument of each input, a copy by default. within: a context for the call.
    """

    def __init__(
        self,
        candidate: Candidate,
        inputs: Inputs,
        *,
        prepare: Callable[[Any], Any] = copied,
        within: contextlib.AbstractContextManager[Any] | None = None,
    ) -> None:
        self.op, self.call = candidate.op, candidate.provider.call
        self.args: Leaves = {name: prepare(value) for name, value in inputs.args.items()}
        for name in self.op.differentiable:
            self.args[name].requires_grad_()
        with within or contextlib.nullcontext():
            outputs = outputs_of(candidate, self.args, inputs.params)
        self.outputs = dict(zip(self.op.outputs, outputs, strict=False))
        self.upstream = {name: g for name, g in inputs.upstream.items() if g is not None}

    def backward(self) -> None:
        """Add the gradients to ``.grad`` of the arguments."""
        outputs = [self.outputs[name] for name in self.upstream]
        upstream = [
            gradient.clone().to(self.outputs[name].dtype)
            for name, gradient in self.upstream.items()
        ]
        with Raised.in_call(self.op, self.call):
            torch.autograd.backward(outputs, upstream, retain_graph=True)

    def gradients(
        self, change: Callable[[torch.Tensor], torch.Tensor] = torch.clone, *, copy: bool = True
    ) -> dict[str, torch.Tensor]:
        """Gradients by input name; ``change`` is applied to each upstream gradient first. copy:
        they have memory of their own, whatever the backward pass returns.

        Raises GradientError for one that is missing: nothing else about it can be compared.
        """
        with Raised.in_call(self.op, self.call):
            found = torch.autograd.grad(
                [self.outputs[name] for name in self.upstream],
                [self.args[name] for name in self.op.differentiable],
                [
                    change(gradient).to(self.outputs[name].dtype)
                    for name, gradient in self.upstream.items()
                ],
                retain_graph=True,
                allow_unused=True,
            )
        named = zip(self.op.differentiable, found, strict=True)
        gradients = {name: gradient for name, gradient in named if gradient is not None}
        if missing := sorted(set(self.op.differentiable) - set(gradients)):
            raise GradientError(f"{self.op.name}: no gradient for {', '.join(missing)}")
        return {name: one.clone() if copy else one for name, one in gradients.items()}
