"""From a provider's forward and backward: the autograd function and the custom op.

A provider that autograd cannot differentiate (a kernel) is a class:

    @rms_norm.provider("triton", saved={"rstd": Tensor("B T", dtype=torch.float32)},
                       keep=("x", "weight"))
    class Triton:
        @staticmethod
        def forward(x, weight, eps):            # -> outputs, then the saved tensors
            return y, rstd

        @staticmethod
        def backward(
            grads: Grads, kept: Named, saved: Named, needs: Needs, eps: float
        ) -> Named:                             # -> gradients by input name
            return {"x": dx, "weight": dweight}

``grads`` holds one upstream gradient per output, None where that output was not used; ``kept`` the
inputs or outputs named in ``keep``; ``needs`` the names whose gradient is wanted.
``reads={"x": contiguous}`` says by which function an input gets a layout that the kernels read;
where that copies, the copy is kept for the backward pass. (A compiled call copies in both passes.)

``replays=True`` says that what forward and backward allocate and launch follows from the layouts of
their tensors and from the parameters alone, and that every kernel is launched through
`tinyllama.harness.kernels.jit`. On a GPU they are then run three times for each signature, and
repeated after that by a plan (`tinyllama.harness.kernels.plans`).

In eager mode the autograd function is called directly, since a custom op's dispatch costs
microseconds a call; under torch.compile the custom op, as one opaque node with declared shapes. A
second derivative raises an error: a gradient that is silently detached would be wrong.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from tinyllama.harness.declare.arguments import spread
from tinyllama.harness.declare.checked import BySignature, Check, named
from tinyllama.harness.declare.custom_op import Passes, cast_by_autocast, several
from tinyllama.harness.declare.specs import DeclarationError, Signature
from tinyllama.harness.kernels.layout import memory_of
from tinyllama.harness.kernels.plans import Repeated

__all__ = ["Derived", "Grads", "Named", "Needs", "SomeGrads", "derive", "several"]

# What a backward takes and returns; gradients of several outputs are `SomeGrads`.
Grads = Sequence[torch.Tensor]
SomeGrads = Sequence[torch.Tensor | None]
Named = Mapping[str, torch.Tensor]
Needs = set[str]
MOST_LAYOUTS = 64  # of gradients and saved tensors, in backward passes of one signature


def _resolved(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
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


class Calls:
    """What is known of calls of one signature: their parameters, and how their passes are run, as
    written or repeated by a plan (`tinyllama.harness.kernels.plans`)."""

    def __init__(self, derived: Passes, params: dict[str, Any]) -> None:
        self._derived, self._params = derived, tuple(params.values())
        self.forward = Repeated(self._run_forward, derived.replays)
        self._backward: dict[tuple[bool, ...], BySignature[Repeated]] = {}

    def _run_forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = self._derived.run_forward(*inputs, *self._params)
        return tuple(_no_view(result, inputs) for result in results)

    def backward(self, needs: tuple[bool, ...], tensors: tuple[torch.Tensor | None, ...]) -> Any:
        """Gradients of the inputs, and None. tensors: upstream gradients, then what was saved."""
        tensors = _resolved(tensors)
        if not self._derived.replays:
            return self._run_backward(needs, *tensors)
        passes = self._backward.get(needs)
        if passes is None:
            passes = self._backward[needs] = BySignature(MOST_LAYOUTS)
        backward = passes.get(tensors, {})
        if backward is None:
            backward = Repeated(functools.partial(self._run_backward, needs))
            passes.put(tensors, {}, backward)
        return backward.run(*tensors)

    def _run_backward(self, needs: tuple[bool, ...], *tensors: torch.Tensor | None) -> Any:
        n_grads = len(self._derived.op.outputs)
        grads, saved = tensors[:n_grads], tensors[n_grads:]
        return (*self._derived.run_backward(grads, saved, self._params, needs), None)


@dataclass(frozen=True)
class Derived(Passes):
    """A provider given as forward and backward, and the function of autograd that it becomes."""

    calls: "BySignature[Calls]" = field(default_factory=BySignature, repr=False)

    def __post_init__(self) -> None:
        _ = self.custom_op  # declared at once: while it traces, the compiler cannot

    def caller(self, check: Check = lambda args, params: None) -> Callable[..., Any]:
        """The provider as a function of the inputs in order and the parameters by name. check: is
        called for each new signature before anything else, and raises an error for a wrong one."""
        apply, defaults, signatures = self.function.apply, self.op.params, self.calls
        single = len(self.op.outputs) == 1

        def call(*args: Any, **params: Any) -> Any:
            if torch.compiler.is_compiling():  # once, when the call is traced
                check(args, params)
                params = {**defaults, **params}
                outputs = several(self.custom_op(*cast_by_autocast(args), *params.values()))
                return outputs[0] if single else outputs[: len(self.op.outputs)]
            args = _resolved(args)
            calls = signatures.get(args, params)
            if calls is None:
                check(args, params)
                calls = Calls(self, {**defaults, **params})
                outputs = apply(*args, calls)  # raises an error for tensors of a transform
                signatures.put(args, params, calls)
                return outputs
            return apply(*args, calls)

        return named(call, f"{self.op.name}_{self.name}")

    @cached_property
    def function(self) -> type[torch.autograd.Function]:
        """The autograd function: the inputs in order, and last what is known of such calls."""
        derived, n_outputs = self, len(self.op.outputs)

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *args: Any) -> Any:
                ctx.set_materialize_grads(False)
                ctx.calls = calls = args[-1]
                inputs = derived.as_read(args[:-1])
                results = calls.forward.run(*inputs)
                ctx.save_for_backward(
                    *derived.tensors_to_keep(inputs, results), *results[n_outputs:]
                )
                return results[0] if n_outputs == 1 else results[:n_outputs]

            @staticmethod
            def backward(ctx: Any, *grads: Any) -> Any:
                # A graph of this would not reach the inputs: some second derivatives would be
                # missing silently, so all raise an error.
                if torch.is_grad_enabled():
                    fix = "leave create_graph out, or use the provider 'eager'"
                    text = f"{derived.op.name}-{derived.name} has no second derivative: {fix}"
                    raise RuntimeError(text)
                if all(grad is None for grad in grads):  # whoever used the outputs gave none
                    return (None,) * len(ctx.needs_input_grad)
                return ctx.calls.backward(ctx.needs_input_grad, (*grads, *ctx.saved_tensors))

        Function.__name__ = f"{self.op.name}_{self.name}"
        return Function


def derive(op: Signature, name: str, implementation: Any, traits: dict[str, Any]) -> Derived | None:
    """The derived form of a class with forward and backward; None for a plain function."""
    if not isinstance(implementation, type):
        return None
    saved = traits.pop("saved", {})
    keep = tuple(traits.pop("keep", ()))
    reads, replays = traits.pop("reads", {}), traits.pop("replays", False)
    if unknown := sorted(set(reads) - set(op.inputs)):
        text = f"reads unknown inputs {unknown}: use {', '.join(op.inputs)}"
        raise DeclarationError(f"op {op.name!r}: {name!r} {text}")
    if any(tensor.optional for tensor in op.inputs.values()):
        text = "is a class, whose inputs are never None: register a function that applies an "
        raise DeclarationError(f"op {op.name!r}: {name!r} {text}autograd.Function of your own")
    forward, backward = (getattr(implementation, which) for which in ("forward", "backward"))
    return Derived(op, name, spread(forward), backward, keep, saved, reads, replays)
