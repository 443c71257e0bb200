"""Second derivatives: right, or refused by an error."""

from collections.abc import Iterator, Mapping

import torch

from tinyllama.harness.check.compare import SLACK, apart, near
from tinyllama.harness.check.evaluate import Inputs, raising_in
from tinyllama.harness.check.finding import Candidate, Problem, Rank, Unsupported
from tinyllama.harness.check.history import Graph

MOST_ERROR = 1e-3  # of the norm of a result
ONCE = "mark the backward pass as once_differentiable"


def second_derivative(candidate: Candidate) -> Problem:
    """A second derivative is right, or raises; silently detached ones are a warning: mark the
    backward pass as ``once_differentiable``."""
    if not candidate.op.differentiable:
        raise Unsupported("it has no gradients")
    case = candidate.telling()
    declared = candidate.provider.double_backward
    inputs = candidate.inputs(case)
    Graph(candidate, inputs).gradients()  # which raises an error for one that is missing
    try:
        second = _second(candidate, inputs)
    except RuntimeError as error:
        text = f"declared to have a second derivative: {error}"
        return (case, text, Rank.REFUSED) if declared else None
    if second is None:
        text = f"first derivatives under create_graph are silently detached: {ONCE}"
        return case, text, Rank.WARNING
    wrong = ", ".join(_wrong(candidate, inputs, second))
    if declared:
        text = f"its second derivative by {wrong} is not the reference's"
        return (case, text) if wrong else None
    text = "declared to have no second derivative, and gives "
    if wrong:
        return case, f"{text}a wrong one by {wrong}: {ONCE}"
    return case, f"{text}one: {ONCE}, or declare it", Rank.REFUSED


def _wrong(
    candidate: Candidate, inputs: Inputs, second: Mapping[str, torch.Tensor]
) -> Iterator[str]:
    """The inputs by which a second derivative is not the reference's."""
    right = _second(candidate.reference, inputs.double())
    in_float32 = _second(candidate.reference, inputs)
    if right is None or in_float32 is None:  # it is zero
        return
    for name, value in right.items():
        error = SLACK * apart(in_float32[name], value).norm().item()
        if not near(second.get(name, torch.zeros_like(value)), value, MOST_ERROR, error):
            yield name


def _second(candidate: Candidate, inputs: Inputs) -> dict[str, torch.Tensor] | None:
    """Gradients of the squares of the gradients; None where those are detached.

    Raises RuntimeError, torch's own or the provider's, when there are none.
    """
    with raising_in(candidate.op, candidate.provider.call):
        graph = Graph(candidate, inputs)
        upstream = {f"upstream {n}": g.clone() for n, g in graph.upstream.items()}
        sources = {name: graph.args[name] for name in candidate.op.differentiable} | upstream
        outputs = [graph.outputs[name] for name in graph.upstream]
        first = torch.autograd.grad(
            outputs,
            [graph.args[name] for name in candidate.op.differentiable],
            [gradient.requires_grad_() for gradient in upstream.values()],
            create_graph=True,
            allow_unused=True,
        )
        attached = [g for g in first if g is not None and g.requires_grad]
        if not attached:
            return None
        squares = torch.stack([g.double().square().sum() for g in attached]).sum()
        second = torch.autograd.grad(squares, list(sources.values()), allow_unused=True)
        by_name = {name: g for name, g in zip(sources, second, strict=True) if g is not None}
        if not by_name:  # nothing leads to them, and what would raise an error was not reached
            squares.backward()
    return by_name or None
