"""What an op is: a declaration from which every test, timing and table follows.

An op is declared once, in one file, as data plus a reference. Its providers are
implementations of the same mathematics (``eager``, ``torch``, ``triton``, ...); the
reference, run in float64, is the oracle that all of them are held to.
"""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tinyllama.harness.declare.arguments import spread
from tinyllama.harness.declare.autograd import derive
from tinyllama.harness.declare.checked import checked
from tinyllama.harness.declare.provider import Provider, RandomDims, StepChoices
from tinyllama.harness.declare.specs import (
    FLOATS,
    TIMED_LAYOUTS,
    Case,
    Signature,
    Tensor,
    Terms,
    names_in,
    size_of,
    sizes_in,
)
from tinyllama.harness.declare.validation import (
    NAME,
    check_declaration,
    check_signature,
    check_traits,
    require,
)
from tinyllama.harness.declare.values import Values

Magnitudes = Callable[..., Mapping[str, torch.Tensor]]


@dataclass(eq=False, kw_only=True)
class Op(Signature):
    """An op: its signature, its cases, and the providers registered on it.

    name, inputs, outputs, params, leading: its signature, see `Signature`.
    cases: shapes in which something can go wrong. The first one is also used for layouts, extreme
        values and repeated calls, so it should be small and general.
    timed: shapes for the performance suite, from small to large; where there is no GPU only the
        first is timed, elsewhere all others.
    extremes: named overrides of input distributions; each is a case of its own.
    dtypes: the floating-point dtypes that its cases cover.
    calls: the number of successive calls after which results are compared (in-place ops: more than
        one).
    fits: a function of the sizes by dimension and of the parameters that returns what is wrong with
        them, or None; for conditions that the shapes of single inputs cannot express, such as one
        size that divides another.
    instead: what to use in place of common arguments that the op does not take; it is the last
        part of the errors for wrong arguments.
    bytes, flops: functions of the sizes by dimension, by pass ("forward", "backward"): the fewest
        bytes moved, which also takes the bytes of an element, and the operations done; the source
        of every bandwidth and roofline.
    computes: False for an op that only moves memory, and has no operations.
    layouts: layout of the inputs -> the time that a provider with a backward of its own may take,
        as a multiple of its time on contiguous inputs. The first one moves the most bytes; the
        gate times it, too.
    slowdowns: metric -> the slowdown (0.02: 2%) that the gate may not call SAME, if not the
        default (`tinyllama.harness.gate.benchmarks`).
    asks: by provider, a function that asks the chip's table what a training step asks before it
        calls that provider; ``tune --show`` prints it. Arguments: the first input, on the meta
        device, and the dtype of products.
    small_kernels: kernels, by the function's name, that see no tensor of more than 2^31 elements
        however large the inputs are, and why.

    Raises DeclarationError for a declaration that contradicts itself.
    """

    cases: Sequence[Case]
    timed: Sequence[Case] = ()
    extremes: Mapping[str, Mapping[str, Values]] = field(default_factory=dict)
    calls: int = 1
    dtypes: tuple[torch.dtype, ...] = FLOATS
    bytes: Mapping[str, Callable[..., float]] = field(default_factory=dict)
    flops: Mapping[str, Callable[..., float]] = field(default_factory=dict)
    slowdowns: Mapping[str, float] = field(default_factory=dict)
    layouts: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(TIMED_LAYOUTS, 2.0))
    instead: str = ""
    fits: Callable[[Mapping[str, Any]], str | None] = lambda sizes: None
    computes: bool = True
    small_kernels: Mapping[str, str] = field(default_factory=dict)

    providers: dict[str, Provider] = field(default_factory=dict, init=False)
    independents: dict[str, Callable[..., Any]] = field(default_factory=dict, init=False)
    magnitudes: Magnitudes | None = field(default=None, init=False)
    terms: Terms = field(default=Terms(), init=False)
    dims_of: RandomDims | None = field(default=None, init=False)
    asks: dict[str, StepChoices] = field(default_factory=dict, init=False)
    module: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self.module = _calling_module()
        outputs = self.outputs.items()
        self.outputs = {name: Tensor(x) if isinstance(x, str) else x for name, x in outputs}
        check_declaration(self)
        self.cases = [*self.cases, *_without_optional(self)]

    # -- what a file adds to its declaration ------------------------------------------------

    def reference(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register the ``eager`` provider; run in float64 it is the oracle."""
        self.provider("eager")(function)
        return function

    def provider(self, name: str, **traits: Any) -> Callable[[Any], Any]:
        """Register an implementation: a function that autograd can differentiate, or a class
        with ``forward`` and ``backward`` (see `tinyllama.harness.declare.autograd`). It may take
        many inputs as one NamedTuple (see `tinyllama.harness.declare.arguments`)."""
        require(bool(NAME.match(name)), self.name, f"provider name {name!r}: use lower_case")
        text = f"provider {name!r} is registered twice: pick another name"
        require(name not in self.providers, self.name, text)
        module = _calling_module()

        def register(implementation: Any) -> Any:
            traits.setdefault("dtypes", self.dtypes)
            check_traits(self, name, traits)
            derived = derive(self, name, implementation, traits)
            if derived is None:
                call = spread(implementation, self.params)
                check_signature(self, name, call)
            else:
                traits.setdefault("double_backward", False)
                check_signature(self, name, derived.forward)
            # An op in place takes lists of any shape, and its provider checks them.
            check = functools.partial(self.check, provider=name)
            checks = not self.mutated and bool(derived or "triton" in traits.get("requires", ()))
            if derived is not None:
                call = derived.caller(*[check] * checks)
            elif checks:
                call = checked(check, call)
            self.providers[name] = Provider(
                self.name, name, call, derived=derived, module=module, checks=checks, **traits
            )
            return implementation

        return register

    def independent(self, source: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register code that is not ours and computes the same; it checks the reference."""

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            call = spread(function, self.params)
            check_signature(self, source, call)
            self.independents[source] = call
            return function

        return register

    def magnitude(
        self,
        function: Magnitudes | None = None,
        *,
        rounded_to: torch.dtype | None = None,
        shared: bool = False,
    ) -> Callable[..., Any]:
        """Register the magnitude of the terms that are summed into a result: the root of
        the sum of their squares.

        It takes the inputs by name (float64), ``upstream`` (a dict of gradients by output
        name) and the parameters, and returns for names such as ``"o"`` or ``"grad q"`` a
        tensor of that result's shape. Only results that can cancel to (nearly) zero, in a
        way that perturbed inputs do not show, need one.

        rounded_to: the dtype in which the terms are held, where a narrower result is computed in
        a wider one, as softmax minus one is in float32. By default that of the result.
        shared: all elements of a result may share one rounded factor, as they do where one
        difference of two scores is all that a short sequence has.
        """
        if function is None:
            return functools.partial(self.magnitude, rounded_to=rounded_to, shared=shared)
        self.magnitudes, self.terms = function, Terms(rounded_to, shared)
        return function

    def random_dims(self, function: RandomDims) -> RandomDims:
        """Register how random cases are drawn where dimensions depend on each other: a function
        of ``draw(low, high)`` that returns sizes by dimension."""
        self.dims_of = function
        return function

    @property
    def folder(self) -> Path | None:
        """The folder that the op is declared in; None where it is one file."""
        file = Path(str(sys.modules[self.module].__file__))
        return file.parent if file.name == "__init__.py" else None

    # -- use --------------------------------------------------------------------------------

    def __getitem__(self, provider: str) -> Provider:
        if provider not in self.providers:
            names = ", ".join(self.providers)
            raise ValueError(f"{self.name} has no provider {provider!r}: use one of {names}")
        return self.providers[provider]

    def __call__(self, *args: Any, provider: str = "eager", **params: Any) -> Any:
        """Run a provider on checked inputs. Raises ValueError when a shape, a dtype, a device or a
        parameter contradicts the declaration."""
        chosen = self[provider]
        if not chosen.checks:
            self.check(args, params)
        return chosen.call(*args, **params)

    def check(
        self, args: Sequence[Any], params: Mapping[str, Any], provider: str | None = None
    ) -> None:
        """Raise ValueError for arguments that contradict the declaration or each other, or that
        the kernels of a provider do not know."""
        dims = self.check_arguments(args, params)
        if reason := self.misfit(dims, params):
            raise ValueError(f"{self.name}: {reason}")
        tensors = [
            (name, tensor)
            for (name, declared), value in zip(self.inputs.items(), args, strict=True)
            for tensor in (value if declared.many else [value])
            if tensor is not None
        ]
        sized = [(name, x.device) for name, x in tensors if x.dim()]  # a scalar may be on the host
        for name, device in sized:
            if device != sized[0][1]:
                text = f"{sized[0][0]} is on {sized[0][1]} and {name} on {device}"
                raise ValueError(f"{self.name}: {text}: move them to one device")
        dtypes = None if provider is None else self.providers[provider].dtypes
        for name, x in tensors:
            if dtypes is not None and self.inputs[name].dtype is None and x.dtype not in dtypes:
                names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
                text = f"{name} has dtype {x.dtype}: use one of {names}, or the provider 'eager'"
                raise ValueError(f"{self.name}-{provider}: {text}")

    def misfit(self, dims: Mapping[str, Any], params: Mapping[str, Any]) -> str | None:
        """What `fits` says is wrong with these sizes and parameters, or what it raises."""
        try:
            return self.fits({**self.numbers(dims), **self.params, **params})
        except Exception as error:  # as of a remainder by a parameter of zero
            return f"its sizes and parameters do not fit: {type(error).__name__}: {error}"

    def check_arguments(self, args: Sequence[Any], params: Mapping[str, Any]) -> dict[str, Any]:
        """Match arguments against the declaration and return the sizes of the dimensions."""
        if len(args) != len(self.inputs):
            text = f"takes {len(self.inputs)} tensors ({', '.join(self.inputs)}), got {len(args)}"
            raise ValueError(f"{self.name} {text}{self._instead}")
        for name in params.keys() - self.params.keys():
            text = f"has no parameter {name!r}: use {', '.join(self.params) or 'none'}"
            raise ValueError(f"{self.name} {text}{self._instead}")
        dims: dict[str, Any] = {}
        computed: list[tuple[str, str, int]] = []  # input, axis, size
        for (name, declared), value in zip(self.inputs.items(), args, strict=True):
            if value is None and declared.optional:
                continue
            for entry, tensor in enumerate(value if declared.many else [value]):
                for axis, size in _sizes(self, name, declared, tensor):
                    if not axis.isidentifier():
                        computed.append((name, axis, size))
                        continue
                    key = f"{axis}[{entry}]" if declared.many else axis
                    if dims.setdefault(key, size) != size:
                        text = f"has {axis} = {size}, other inputs have {axis} = {dims[key]}"
                        raise ValueError(f"{self.name}: {name} {text}")
        pairs = [*dims.items(), *((axis, size) for _, axis, size in computed)]
        dims |= sizes_in((axis, size) for axis, size in pairs if "[" not in axis)
        for name, axis, size in computed:
            if names_in(axis) - dims.keys() or size_of(axis, dims) != size:
                bound = sorted(names_in(axis) & dims.keys())
                sizes = "".join(f" and {dimension} = {dims[dimension]}" for dimension in bound)
                text = f"{name} has {axis} = {size}{sizes}: they do not fit"
                raise ValueError(f"{self.name}: {text}")
        return dims

    @property
    def _instead(self) -> str:
        return self.instead and f" ({self.instead})"


def _calling_module() -> str:
    """The module from which this file is called."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


def _sizes(op: Op, name: str, declared: Tensor, tensor: Any) -> list[tuple[str, Any]]:
    """The axes of an input with their sizes. Raises ValueError for what is no such tensor."""
    if not isinstance(tensor, torch.Tensor):
        got = f"{type(tensor).__name__}{op._instead}"
        raise ValueError(f"{op.name}: {name} must be a tensor, got {got}")
    sizes = op.sizes_of(declared, tensor.shape)
    if sizes is None:
        text = f"{name} has shape {tuple(tensor.shape)}, expected ({declared.shape})"
        raise ValueError(f"{op.name}: {text}")
    if declared.dtype is not None and tensor.dtype not in (declared.dtype, torch.float64):
        raise ValueError(f"{op.name}: {name} has dtype {tensor.dtype}, expected {declared.dtype}")
    return sizes


def _without_optional(op: Op) -> list[Case]:
    """The first case without each optional input, and without all; those that none declares."""
    optional = [(name,) for name, tensor in op.inputs.items() if tensor.optional]
    absent = [*optional, *([sum(optional, ())] if len(optional) > 1 else [])]
    declared = [case.without for case in op.cases]
    return [op.cases[0].lacking(*names) for names in absent if names not in declared]
