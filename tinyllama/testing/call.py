"""Calls of a candidate and of its reference with the same arguments, and all of their results."""

import copy
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.func import functional_call
from torch.utils._pytree import TreeSpec, keystr, tree_flatten_with_path, tree_unflatten

from tinyllama.harness.check.evaluate import Inputs, Place, copied, same_memory
from tinyllama.harness.declare.specs import FLOATS
from tinyllama.harness.machine.errors import UsageError

Tensors = dict[str, torch.Tensor]
DIFFERENTIABLE = (*FLOATS, torch.float64)


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function, or of the class of a module."""
    return str(getattr(function, "__name__", type(function).__name__))


@dataclass(frozen=True)
class Argument:
    """One argument of a call: a tensor, any other Python value, or a structure of these.

    keyword: None for a positional argument. leaves: the names of what the structure contains.
    """

    keyword: str | None
    leaves: tuple[str, ...]
    structure: TreeSpec


@dataclass(frozen=True)
class Results:
    """Outputs by name, gradients as ``"grad x"``, and inputs that were written by their own name.

    inputs, upstream: the names of inputs, and of outputs whose upstream gradients, that the call
        wrote into.
    """

    tensors: Tensors
    inputs: list[str]
    upstream: list[str]


class Call:
    """The arguments of a call, which candidate and reference take alike.

    The parameters of a reference that is a module are inputs too: ``"parameter weight"``.
    """

    def __init__(
        self,
        candidate: Callable[..., Any],
        reference: Callable[..., Any],
        positional: Sequence[Any],
        keywords: Mapping[str, Any],
        grad: bool | Collection[str],
    ) -> None:
        values: dict[str, Any] = {}
        self._arguments: list[Argument] = []
        names = _names((candidate, reference), len(positional))
        given = [*zip(names, positional, strict=True), *keywords.items()]
        for place, (name, value) in enumerate(given):
            pairs, structure = tree_flatten_with_path(value)
            leaves = {f"{name}{keystr(path)}": leaf for path, leaf in pairs}
            keyword = None if place < len(positional) else name
            self._arguments.append(Argument(keyword, tuple(leaves), structure))
            values.update(leaves)
        tensors = {name: one for name, one in values.items() if isinstance(one, torch.Tensor)}
        if not tensors:
            raise UsageError("no argument is a tensor: give assert_accurate the inputs of the call")
        shared = _shared_parameters(candidate, reference)
        wanted = [name for name, one in tensors.items() if one.dtype in DIFFERENTIABLE] + shared
        if isinstance(reference, torch.nn.Module):
            tensors.update({f"parameter {n}": one for n, one in reference.named_parameters()})
        for name, tensor in tensors.items():
            if tensor.is_complex():
                raise UsageError(f"{name} is complex: compare torch.view_as_real of it")
        if not isinstance(grad, bool):
            if unknown := sorted({*grad} - {*wanted}):
                raise UsageError(f"grad={unknown}: use names of {wanted}")
            wanted = [name for name in wanted if name in grad]
        self.inputs = Inputs(
            {name: one.detach() for name, one in tensors.items()},
            {},
            {name: value for name, value in values.items() if name not in tensors},
            wanted=tuple(wanted) if grad else (),
        )

    def run(
        self,
        function: Callable[..., Any],
        inputs: Inputs,
        *,
        double: bool = False,
        place: Place = lambda tensor, name: copied(tensor),
    ) -> Results:
        """Forward and backward of a function on copies of the inputs.

        An upstream gradient counts where ``inputs`` has one for an output of that shape and dtype.
        double: a module runs as a copy in float64. place: makes the copies.
        """
        leaves = {name: place(tensor, name) for name, tensor in inputs.args.items()}
        before = {name: copied(leaf) for name, leaf in leaves.items()}
        wanted = inputs.wanted or ()
        for name in wanted:
            leaves[name].requires_grad_(True)
        with torch.set_grad_enabled(bool(wanted)):
            outputs = self._outputs(function, leaves, inputs.params, double)
        reached = {
            name: gradient
            for name, gradient in inputs.upstream.items()
            if gradient is not None
            and name in outputs
            and outputs[name].requires_grad
            and (outputs[name].shape, outputs[name].dtype) == (gradient.shape, gradient.dtype)
        }
        upstream = {name: place(one, f"grad {name}") for name, one in reached.items()}
        given = {name: copied(gradient) for name, gradient in upstream.items()}
        results = {name: output.detach() for name, output in outputs.items()}
        if upstream:
            gradients = torch.autograd.grad(
                [outputs[name] for name in upstream],
                [leaves[name] for name in wanted],
                list(upstream.values()),
                allow_unused=True,
            )
            pairs = zip(wanted, gradients, strict=True)
            results.update({f"grad {name}": one for name, one in pairs if one is not None})
        written = [name for name, one in before.items() if not same_memory(leaves[name], one)]
        results.update({name: leaves[name].detach() for name in written})
        changed = [name for name, one in given.items() if not same_memory(upstream[name], one)]
        return Results(results, written, changed)

    def _outputs(
        self, function: Callable[..., Any], leaves: Tensors, constants: Any, double: bool
    ) -> Tensors:
        values = {**constants, **leaves}
        positional, keywords = [], {}
        for argument in self._arguments:
            value = tree_unflatten([values[name] for name in argument.leaves], argument.structure)
            if argument.keyword is None:
                positional.append(value)
            else:
                keywords[argument.keyword] = value
        if isinstance(function, torch.nn.Module):
            module = copy.deepcopy(function)
            module = module.double() if double else module
            parameters = {
                name: leaves[f"parameter {name}"]
                for name, _ in module.named_parameters()
                if f"parameter {name}" in leaves
            }
            return _named(functional_call(module, parameters, tuple(positional), keywords))
        return _named(function(*positional, **keywords))


def _named(outputs: Any) -> Tensors:
    """The tensors of what a call returned, by name; numbers are tensors too."""
    found = {}
    for path, value in tree_flatten_with_path(outputs)[0]:
        name = f"output{keystr(path)}"
        if isinstance(value, (bool, int, float)):
            value = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif value is not None:
            raise UsageError(f"{name} is a {type(value).__name__}: return tensors and numbers")
    return found


def _names(functions: Sequence[Callable[..., Any]], count: int) -> list[str]:
    """Of positional arguments, as the first of these functions that has a signature calls them."""
    for function in functions:
        called = function.forward if isinstance(function, torch.nn.Module) else function
        try:
            parameters = inspect.signature(called).parameters.values()
        except (TypeError, ValueError):  # a function of C
            continue
        names = [
            parameter.name
            for parameter in parameters
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        if len(names) >= count:
            return names[:count]
    return [f"argument {place}" for place in range(count)]


def _shared_parameters(candidate: Any, reference: Any) -> list[str]:
    """The parameters whose gradients are compared: both modules have them.

    Raises UsageError where their values differ.
    """
    if not all(isinstance(one, torch.nn.Module) for one in (candidate, reference)):
        return []
    theirs, found = dict(reference.named_parameters()), []
    for name, parameter in candidate.named_parameters():
        if name not in theirs:
            continue
        other = theirs[name]
        if parameter.dtype != other.dtype or not torch.equal(parameter, other):
            raise UsageError(
                f"parameter {name} differs between {name_of(candidate)} and {name_of(reference)}: "
                "call candidate.load_state_dict(reference.state_dict()) first"
            )
        if other.requires_grad:
            found.append(f"parameter {name}")
    return found
