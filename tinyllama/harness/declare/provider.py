"""A provider: one implementation of an op, and its traits."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from tinyllama.harness.declare.autograd import Derived
from tinyllama.harness.declare.offsets import Large
from tinyllama.harness.declare.specs import Signature

MOST_SLACK = 100.0  # with a larger slack, meaningless results would pass
RandomDims = Callable[[Callable[[int, int], int]], Mapping[str, Any]]
StepChoices = Callable[[torch.Tensor, torch.dtype], None]
AnOp = TypeVar("AnOp", bound=Signature)


@dataclass(frozen=True)
class Provider:
    """One implementation of an op.

    call: takes the op's inputs in order and its parameters by name, returns its outputs
        (a tensor, or a tuple in the declared order; None for an in-place op).
    dtypes: the floating-point dtypes it supports (those of the op, unless it says fewer).
    deterministic: equal inputs give equal bits, in a set of device types ("cpu", "cuda").
    double_backward: second derivatives are right; if False they must raise, if None they may.
    slack: by dtype, multiple of the error otherwise allowed, up to `MOST_SLACK`; declared with its
        reason beside it.
    requires: capabilities of `tinyllama.harness.machine.device` without which it cannot run.
    supports: None when a case's dims are supported, else the reason why they are not; a leading
        dimension of several axes is given as their product.
    overwrites: inputs that its backward changes, and outputs whose upstream gradient it changes.
    frozen: inputs for which it computes no gradient.
    contiguous: it accepts only contiguous inputs, and raises an error for others.
    output_dtypes: by output, its dtype if that is not the one that the op declares.
    waits: its calls cannot be enqueued ahead of the device: they read a value back from it, or
        launch more kernels than its queue holds (about 1,000).
    counts_on_host: its calls read a step count that is kept on the host: a graph would freeze it.
    slowdowns: as `Op.slowdowns`, for a provider that needs others.
    large: its cases of more than 2^31 elements; one that launches kernels of its own has one.
    borrows: why all kernels that it launches are another op's; those are tested with that op.
    races: kernels (``file.function``) of which two programs may store to one address, and why that
        does no harm.
    random_dims: as `Op.random_dims`, where this provider needs smaller ones.
    module: of the file that registered it, which need not be the op's.
    checks: its calls are checked against the declaration.
    """

    op: str
    name: str
    call: Callable[..., Any]
    dtypes: tuple[torch.dtype, ...]
    deterministic: frozenset[str] = frozenset({"cpu", "cuda"})
    double_backward: bool | None = True
    slack: Mapping[torch.dtype, float] = field(default_factory=dict)
    requires: tuple[str, ...] = ()
    supports: Callable[[Mapping[str, Any]], str | None] = lambda dims: None
    overwrites: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    contiguous: bool = False
    output_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    waits: bool = False
    counts_on_host: bool = False
    slowdowns: Mapping[str, float] = field(default_factory=dict)
    large: tuple[Large, ...] = ()
    borrows: str = ""
    races: Mapping[str, str] = field(default_factory=dict)
    random_dims: RandomDims | None = None
    derived: Derived | None = None
    module: str = ""
    checks: bool = False

    def __call__(self, *args: Any, **params: Any) -> Any:
        return self.call(*args, **params)

    def slack_in(self, dtype: torch.dtype) -> float:
        return self.slack.get(dtype, 1.0)

    def offered(self, op: AnOp) -> AnOp:
        """The op without the gradients that this provider does not give."""
        if not self.frozen:
            return op
        less = copy.copy(op)
        less.inputs = {
            name: replace(tensor, grad=tensor.grad and name not in self.frozen)
            for name, tensor in op.inputs.items()
        }
        return less

    def __str__(self) -> str:
        return f"{self.op}-{self.name}"
