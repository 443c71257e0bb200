"""What a saboteur is, and how a fault is put on a right implementation."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from tinyllama.harness import Op, Provider
from tinyllama.harness.declare.autograd import several
from tinyllama.ops import OPS

Call = Callable[..., Any]
Change = Callable[[torch.Tensor], torch.Tensor]

EAGER = {name: op["eager"].call for name, op in OPS.items()}


@dataclass(frozen=True)
class Saboteur:
    """A wrong implementation of an op.

    make: gives the implementation anew, with the state that it keeps between calls.
    checks: those that find it. result: what they must name, where that is one result.
    reference: as the reference of its op, independent code contradicts it as well. of_calling: the
    fault is put on every op that it fits.
    """

    op: Op
    fault: str
    make: Callable[[], Call]
    checks: tuple[str, ...]
    result: str = ""
    reference: bool = False
    traits: Mapping[str, Any] = field(default_factory=dict)
    of_calling: bool = False

    def provider(self) -> Provider:
        return Provider(
            self.op.name, "saboteur", self.make(), **{"dtypes": self.op.dtypes, **self.traits}
        )

    def __str__(self) -> str:
        return f"{self.op.name}-{self.fault}"


# -- a fault on the way in, on the way out, or in backward ----------------------------------------


def on_input(op: Op, name: str, change: Change) -> Call:
    """The reference with one input changed on its way in."""
    index, reference = list(op.inputs).index(name), EAGER[op.name]

    def call(*args: Any, **params: Any) -> Any:
        changed = [change(arg) if i == index else arg for i, arg in enumerate(args)]
        return reference(*changed, **params)

    return call


def on_outputs(op: Op, change: Callable[[int, torch.Tensor], torch.Tensor]) -> Call:
    """The reference with all its outputs changed, by their place."""
    reference = EAGER[op.name]

    def call(*args: Any, **params: Any) -> Any:
        results = reference(*args, **params)
        changed = tuple(change(i, result) for i, result in enumerate(several(results)))
        return changed if isinstance(results, tuple) else changed[0]

    return call


def on_each_output(op: Op, change: Change) -> Call:
    """The reference with all its outputs changed alike."""
    return on_outputs(op, lambda _, output: change(output))


def on_output(op: Op, name: str, change: Change) -> Call:
    """The reference with one output changed on its way out."""
    index = list(op.outputs).index(name)
    return on_outputs(op, lambda i, output: change(output) if i == index else output)


def with_params(op: Op, **forced: Any) -> Call:
    """The reference, which ignores the values of some of its parameters."""
    reference = EAGER[op.name]
    return lambda *args, **params: reference(*args, **{**params, **forced})


class _Upstream(torch.autograd.Function):
    """The identity; its backward changes the upstream gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, change: Change) -> torch.Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.change(grads[0]), None


def with_upstream(x: torch.Tensor, change: Change) -> torch.Tensor:
    """A tensor whose backward sees its upstream gradient changed."""
    changed: torch.Tensor = _Upstream.apply(x, change)
    return changed


def on_upstream(op: Op, change: Change) -> Call:
    """The reference, whose backward sees the gradients of its outputs changed."""
    return on_each_output(op, lambda output: with_upstream(output, change))


def with_gradient_of(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """One tensor's values with the gradient of another."""
    return other + (value - other).detach()


# -- the registers of faults ----------------------------------------------------------------------

_OF_CALLING: list[Callable[[Op], Iterator[Saboteur]]] = []
OF_ARITHMETIC: list[Saboteur] = []


def of_calling(op: Op) -> Iterator[Saboteur]:
    """The faults that an op with gradients can have, whatever it computes."""
    for saboteurs in _OF_CALLING:
        yield from saboteurs(op)


def on_any_op(
    *checks: str, fits: Callable[[Op], bool] = lambda op: True, **traits: Any
) -> Callable[[Callable[[Op], Call]], None]:
    """Register a function that puts a fault on an op: one that these checks must find."""

    def register(put_on: Callable[[Op], Call]) -> None:
        def saboteurs(op: Op) -> Iterator[Saboteur]:
            if fits(op):
                make = partial(put_on, op)
                yield Saboteur(op, put_on.__name__, make, checks, traits=traits, of_calling=True)

        _OF_CALLING.append(saboteurs)

    return register


def of(op: str, *checks: str, result: str = "", reference: bool = False) -> Callable[[Call], Call]:
    """Register a function as a wrong implementation of an op."""

    def register(call: Call) -> Call:
        make = lambda: call  # noqa: E731
        OF_ARITHMETIC.append(Saboteur(OPS[op], call.__name__, make, checks, result, reference))
        return call

    return register


def made_for(
    op: str, *checks: str, result: str = "", reference: bool = False
) -> Callable[[Callable[[], Call]], None]:
    """Register a function that makes a wrong implementation of an op."""

    def register(make: Callable[[], Call]) -> None:
        OF_ARITHMETIC.append(Saboteur(OPS[op], make.__name__, make, checks, result, reference))

    return register
