"""Second derivatives: right, or refused by an error."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from tinyllama.harness.check.compare import SLACK, apart, near
from tinyllama.harness.check.evaluate import Inputs, Raised, copied
from tinyllama.harness.check.finding import Candidate, Problem, Rank, Unsupported
from tinyllama.harness.check.history import Graph
from tinyllama.harness.declare.autograd import several

MOST_APART = 1e-3  # of the norm of a result


def second_derivative(candidate: Candidate) -> Problem:
    """A second derivative is right, or raises; silently detached ones fail, which is advice: to
    mark the backward pass as ``once_differentiable``."""
    if not candidate.op.differentiable:
        raise Unsupported("it has no gradients")
    case = candidate.telling()
    declared = candidate.provider.double_backward
    inputs = candidate.inputs(case)
    Graph(candidate, inputs).gradients()  # which raises an error for one that is missing
    # Kernels do not take float64, nor does a function that is asked as a provider with kernels.
    double = declared and "triton" not in candidate.provider.requires
    try:
        found = second(candidate, candidate.provider.call, inputs.double() if double else inputs)
    except RuntimeError as error:
        text = f"declared to have a second derivative: {error}"
        refused: Problem = (case, text, Rank.REFUSED) if declared else None
        return refused
    if found is None:
        text = "first derivatives under create_graph are silently detached: mark the backward "
        text += "pass as once_differentiable"
        return case, text, Rank.WARNING
    most = 1e-8 if double else MOST_APART
    wrong = ", ".join(_wrong_second(candidate, inputs, found, most))
    once = "mark the backward pass as once_differentiable"
    if declared:
        text = f"its second derivative by {wrong} is not the reference's"
        return (case, text) if wrong else None
    text = "declared to have no second derivative, and gives "
    if wrong:
        return case, f"{text}a wrong one by {wrong}: {once}"
    return case, f"{text}one: {once}, or declare it", Rank.REFUSED


def _wrong_second(
    candidate: Candidate, inputs: Inputs, found: Mapping[str, torch.Tensor], most: float
) -> Iterator[str]:
    """The inputs by which a second derivative is not the reference's. most: of its norm."""
    eager = candidate.op["eager"].call
    right, usual = second(candidate, eager, inputs.double()), second(candidate, eager, inputs)
    if right is None or usual is None:  # it is zero
        return
    for name, value in right.items():
        of_float32 = SLACK * apart(usual[name], value).norm().item()
        if not near(found.get(name, torch.zeros_like(value)), value, most, of_float32):
            yield name


def second(
    candidate: Candidate, call: Callable[..., Any], inputs: Inputs
) -> dict[str, torch.Tensor] | None:
    """Gradients of the squares of the gradients; None where those are detached.

    Raises RuntimeError, torch's own or the provider's, when there are none.
    """
    with Raised.in_call(candidate.op, call):
        return _second(candidate, call, inputs)


def _second(
    candidate: Candidate, call: Callable[..., Any], inputs: Inputs
) -> dict[str, torch.Tensor] | None:
    args = {name: copied(value) for name, value in inputs.args.items()}
    wanted = {name: args[name].requires_grad_() for name in candidate.op.differentiable}
    outputs = several(call(*args.values(), **inputs.params))
    pairs = [
        (output, upstream.clone().requires_grad_())
        for output, upstream in zip(outputs, inputs.upstream.values(), strict=True)
        if upstream is not None
    ]
    first = torch.autograd.grad(
        [output for output, _ in pairs],
        list(wanted.values()),
        [upstream for _, upstream in pairs],
        create_graph=True,
        allow_unused=True,
    )
    attached = [one for one in first if one is not None and one.requires_grad]
    if not attached:
        return None
    squares = torch.stack([one.double().square().sum() for one in attached]).sum()
    wanted |= {f"upstream {index}": upstream for index, (_, upstream) in enumerate(pairs)}
    second = torch.autograd.grad(squares, list(wanted.values()), allow_unused=True)
    found = {name: g for name, g in zip(wanted, second, strict=True) if g is not None}
    if not found:  # nothing leads to them, and what would raise an error was not reached
        squares.backward()
    return found or None
