"""Small ops that are declared in a line, and what checks find in an implementation of one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tinyllama.harness import Case, Op, Provider, Tensor
from tinyllama.harness.check.run import Candidate, Finding, run

FP32 = (torch.float32,)
MATRIX = Tensor("N D", grad=True)
Call = Callable[..., Any]


def small(
    name: str,
    reference: Call,
    inputs: dict[str, Tensor],
    outputs: Mapping[str, str | Tensor],
    cases: Sequence[Case] = (Case(N=5, D=8),),
    **more: Any,
) -> Op:
    """An op of this reference, in float32. more: what else is declared."""
    op = Op(name, inputs=inputs, outputs=outputs, cases=list(cases), dtypes=FP32, **more)
    op.reference(reference)
    return op


def derived(forward: Call, backward: Call) -> type:
    """What a provider with a backward of its own is declared with."""
    passes = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Derived", (), passes)


def found(op: Op, call: Call, *only: str, **traits: Any) -> dict[str, Finding]:
    """What these checks find in a provider of the op, by check; in float32 unless it is told."""
    provider = Provider(op.name, "tried", call, **{"dtypes": FP32, **traits})
    return {
        finding_of_check.check: finding_of_check
        for finding_of_check in run(Candidate(op, provider), only=only)
    }


def finding(op: Op, call: Call, check: str, **traits: Any) -> Finding:
    """What one check finds."""
    return found(op, call, check, **traits)[check]


def with_backward(forward: Call, backward: Call, *, once: bool = False) -> Call:
    """A function of tensors with this backward pass, which is given the upstream gradient and the
    inputs. once: it says that it cannot be differentiated again."""

    class Tried(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: torch.Tensor) -> Any:
            ctx.save_for_backward(*inputs)
            return forward(*inputs)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return backward(gradients[0], *ctx.saved_tensors)

    if once:
        decorated: Any = torch.autograd.function.once_differentiable(Tried.backward)
        Tried.backward = staticmethod(decorated)  # type: ignore[method-assign]
    return Tried.apply
