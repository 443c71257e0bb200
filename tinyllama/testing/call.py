"""A call with its arguments as an op: each tensor in them is an input, each tensor returned an
output, under the name by which a message speaks of it."""

import copy
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.func import functional_call
from torch.utils._pytree import SequenceKey, keystr, tree_flatten_with_path, tree_unflatten

from tinyllama.harness.check.evaluate import OutputError, copied, same_memory
from tinyllama.harness.declare.op import Op, Provider
from tinyllama.harness.declare.specs import FLOATS, STANDARD, Case, Tensor
from tinyllama.harness.declare.values import integers
from tinyllama.harness.machine.errors import UsageError

Tensors = dict[str, torch.Tensor]
DIFFERENTIABLE = (*FLOATS, torch.float64)


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function, or of the class of a module, behind that of its file or package."""
    named = function if hasattr(function, "__name__") else type(function)
    home = (getattr(named, "__module__", None) or "").rpartition(".")
    return ".".join(filter(None, (home[2], named.__name__)))


class Call:
    """The arguments of a call, which candidate and reference take alike.

    tensors: those in the arguments, by name; the parameters of a reference that is a module are
        among them, ``"parameter weight"``. differentiable: the names of those with a gradient.
    written: the names of those that the reference writes; each is an output, too.

    Raises UsageError for arguments that cannot be compared.
    """

    def __init__(
        self,
        candidate: Callable[..., Any],
        reference: Callable[..., Any],
        positional: Sequence[Any],
        keywords: Mapping[str, Any],
        grad: bool | Collection[str],
    ) -> None:
        names = _names((candidate, reference), len(positional))
        pairs, self._structure = tree_flatten_with_path((tuple(positional), dict(keywords)))
        self._values: dict[str, Any] = {}
        for (_, place, *path), value in pairs:
            argument = names[place.idx] if isinstance(place, SequenceKey) else place.key  # type: ignore[attr-defined]
            self._values[f"{argument}{keystr(tuple(path))}"] = value
        inputs = {n: value for n, value in self._values.items() if isinstance(value, torch.Tensor)}
        if not inputs:
            raise UsageError("no argument is a tensor: give assert_accurate the inputs of the call")
        floating = [name for name, tensor in inputs.items() if tensor.dtype in DIFFERENTIABLE]
        floating += _shared_parameters(candidate, reference)
        if isinstance(reference, torch.nn.Module):
            inputs |= {f"parameter {n}": tensor for n, tensor in reference.named_parameters()}
        for name, tensor in inputs.items():
            if tensor.is_complex():
                raise UsageError(f"{name} is complex: compare torch.view_as_real of it")
        if not isinstance(grad, bool):
            if unknown := sorted({*grad} - {*floating}):
                raise UsageError(f"grad={unknown}: use names of {floating}")
            floating = [name for name in floating if name in grad]
        self.differentiable = floating if grad else []
        self.tensors = {name: tensor.detach() for name, tensor in inputs.items()}
        self.written: list[str] = []

    def as_op(
        self, candidate: Callable[..., Any], reference: Callable[..., Any]
    ) -> tuple[Op, Tensors]:
        """The op, whose providers are ``eager`` and ``candidate``, and the reference's outputs."""
        outputs = self._outputs_of(reference)
        op = Op(
            "call",
            inputs={name: self._declared(name, tensor) for name, tensor in self.tensors.items()},
            outputs={
                name: Tensor(" ".join(map(str, y.shape)), dtype=y.dtype)
                for name, y in outputs.items()
            },
            cases=[Case()],
        )
        for name, function in (("eager", reference), ("candidate", candidate)):
            call = self.with_names(function, list(outputs))
            op.providers[name] = Provider(op.name, name, call, dtypes=op.dtypes)
        return op, outputs

    def _declared(self, name: str, tensor: torch.Tensor) -> Tensor:
        values = STANDARD if tensor.is_floating_point() else integers(2)
        shape, grad = " ".join(map(str, tensor.shape)), name in self.differentiable
        return Tensor(shape, dtype=tensor.dtype, grad=grad, values=values)

    def _outputs_of(self, reference: Callable[..., Any]) -> Tensors:
        """What the reference returns, and the inputs that it writes; some require a gradient."""
        copies = {name: copied(tensor) for name, tensor in self.tensors.items()}
        self._run(reference, copies, double=False)
        self.written = [n for n, x in copies.items() if not same_memory(x, self.tensors[n])]
        for name in self.differentiable:
            copies[name] = copied(self.tensors[name]).requires_grad_()
        written = {name: copies[name].clone() for name in self.written}
        return self._run(reference, copies | written, double=False) | written

    def with_names(
        self, function: Callable[..., Any], names: Sequence[str], *, double: bool = False
    ) -> Callable[..., tuple[torch.Tensor, ...]]:
        """A function of all tensors in order that returns the outputs of these names. double: a
        module runs as a copy in float64."""

        def call(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
            tensors = dict(zip(self.tensors, values, strict=True))
            tensors |= {name: tensors[name].clone() for name in self.written}
            outputs = self._run(function, tensors, double)
            outputs |= {name: tensors[name] for name in self.written}
            for name in names:
                if name not in outputs:
                    raise OutputError(f"{name} is missing")
            for name in outputs:
                if name not in names:
                    raise OutputError(f"{name} is not among the results of the reference")
            return tuple(outputs[name] for name in names)

        return call

    def _run(self, function: Callable[..., Any], tensors: Tensors, double: bool) -> Tensors:
        values = [tensors.get(name, value) for name, value in self._values.items()]
        positional, keywords = tree_unflatten(values, self._structure)
        if not isinstance(function, torch.nn.Module):
            return _named(function(*positional, **keywords))
        module = copy.deepcopy(function)
        module = module.double() if double else module
        parameters = {
            name: tensors[f"parameter {name}"]
            for name, _ in module.named_parameters()
            if f"parameter {name}" in tensors
        }
        return _named(functional_call(module, parameters, positional, keywords))


def _named(outputs: Any) -> Tensors:
    """The tensors of what a call returned, by name; numbers are tensors too."""
    tensors = {}
    for path, value in tree_flatten_with_path(outputs)[0]:
        name = f"output{keystr(path)}"
        if isinstance(value, (bool, int, float)):
            value = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        elif value is not None:
            raise OutputError(f"{name} is a {type(value).__name__}: return tensors and numbers")
    return tensors


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
    if not all(isinstance(module, torch.nn.Module) for module in (candidate, reference)):
        return []
    theirs = dict(reference.named_parameters())
    shared = [(n, parameter) for n, parameter in candidate.named_parameters() if n in theirs]
    for name, parameter in shared:
        if parameter.dtype != theirs[name].dtype or not torch.equal(parameter, theirs[name]):
            raise UsageError(
                f"parameter {name} differs between {name_of(candidate)} and {name_of(reference)}: "
                "call candidate.load_state_dict(reference.state_dict()) first"
            )
    return [f"parameter {name}" for name, _ in shared if theirs[name].requires_grad]
