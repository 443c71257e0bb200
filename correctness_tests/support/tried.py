"""Small ops that are declared in a line, and what checks find in an implementation of one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tinyllama.harness import Case, Op, Provider, Tensor
from tinyllama.harness.check.run import Candidate, Finding, run

FP32 = (torch.float32,)
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


def finding(op: Op, call: Call, check: str, **traits: Any) -> Finding:
    """What one check finds in a provider of the op; in float32 unless ``dtypes`` says more."""
    provider = Provider(op.name, "tried", call, **{"dtypes": FP32, **traits})
    (answer,) = run(Candidate(op, provider), only=[check])
    return answer
