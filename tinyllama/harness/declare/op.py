"""What an op is: a declaration from which every test, timing and table follows.

An op is declared once, in one file, as data plus a reference. Its providers are
implementations of the same mathematics (``eager``, ``torch``, ``triton``, ...); the
reference, run in float64, is the oracle that all of them are held to.

Shapes are strings of dimension names: ``"B T D"`` is a tensor with three axes, ``""`` a
scalar. A dimension whose size in a case is a tuple, such as ``N=(1000, 1)``, belongs to
inputs declared ``many``: they are lists of tensors, one for each size.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tinyllama.harness.declare.autograd import Derived, derive
from tinyllama.harness.declare.values import Values, normal

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
STANDARD = normal()
_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")


class DeclarationError(ValueError):
    """A declaration that contradicts itself; the message names the op, the part and the fix."""


@dataclass(frozen=True)
class Tensor:
    """A declared input or output.

    shape: names of the axes, separated by spaces; ``""`` is a scalar.
    grad: a gradient is expected (and then compared in every case).
    dtype: a fixed dtype; None means the dtype of the case. dtype_of: of what a provider saves, its
        dtype from the op's first input.
    values: the distribution of test inputs.
    mutated: the op writes it in place; compared after the calls instead of an output.
    many: a list of tensors, one for each size of a tuple-valued dimension.
    """

    shape: str
    grad: bool = False
    dtype: torch.dtype | None = None
    values: Values | Callable[[Mapping[str, Any]], Values] = STANDARD
    mutated: bool = False
    many: bool = False
    dtype_of: Callable[[torch.Tensor], torch.dtype] | None = None

    def dtype_beside(self, first: torch.Tensor) -> torch.dtype:
        """Its dtype where the op's first input is this one."""
        if self.dtype_of is not None:
            return self.dtype_of(first)
        return self.dtype or first.dtype

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.shape.split())

    def distribution(self, dims: Mapping[str, Any]) -> Values:
        """The distribution for a case; one that depends on its dims is a function of them."""
        return self.values if isinstance(self.values, Values) else self.values(dims)


@dataclass(frozen=True, init=False)
class Case:
    """One shape of an op: sizes by dimension name, and why the case exists.

    ``params`` overrides the op's parameters, ``values`` the distributions of its inputs.
    """

    dims: Mapping[str, Any]
    why: str
    params: Mapping[str, Any]
    values: Mapping[str, Values]

    def __init__(
        self,
        *,
        why: str = "",
        params: Mapping[str, Any] | None = None,
        values: Mapping[str, Values] | None = None,
        **dims: int | tuple[int, ...],
    ) -> None:
        set_field = object.__setattr__
        set_field(self, "dims", dims)
        set_field(self, "why", why)
        set_field(self, "params", dict(params or {}))
        set_field(self, "values", dict(values or {}))

    def resized(self, **dims: int | tuple[int, ...]) -> Case:
        """The same case with other sizes of some dimensions."""
        sizes = {**self.dims, **dims}
        return Case(why=self.why, params=self.params, values=self.values, **sizes)

    def __str__(self) -> str:
        def size(value: int | tuple[int, ...]) -> str:
            return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)

        parts = [f"{name}{size(value)}" for name, value in self.dims.items()]
        parts += [f"{name}={value}" for name, value in self.params.items()]
        return "".join(parts[: len(self.dims)]) + "".join(f",{p}" for p in parts[len(self.dims) :])


@dataclass(frozen=True)
class Provider:
    """One implementation of an op.

    call: takes the op's inputs in order and its parameters by name, returns its outputs
        (a tensor, or a tuple in the declared order; None for an in-place op).
    dtypes: the floating-point dtypes it supports (those of the op, unless it says fewer).
    deterministic: equal inputs give equal bits, in a set of device types ("cpu", "cuda").
    double_backward: second derivatives are right; otherwise they must raise.
    slack: by dtype, multiple of the error otherwise allowed; declared with its reason beside it.
    requires: capabilities of `tinyllama.harness.machine.device` without which it cannot run.
    supports: None when a case's dims are supported, else the reason why they are not.
    overwrites: inputs that its backward leaves changed, which a peer's may; ours never do.
    waits: its calls read a value back from the device, and so cannot be enqueued ahead of it.
    slowdowns: as the op's, where they are not those of this provider.
    module: of the file that registered it, which need not be the op's.
    """

    op: str
    name: str
    call: Callable[..., Any]
    dtypes: tuple[torch.dtype, ...]
    deterministic: frozenset[str] = frozenset({"cpu", "cuda"})
    double_backward: bool = True
    slack: Mapping[torch.dtype, float] = field(default_factory=dict)
    requires: tuple[str, ...] = ()
    supports: Callable[[Mapping[str, Any]], str | None] = lambda dims: None
    overwrites: tuple[str, ...] = ()
    waits: bool = False
    slowdowns: Mapping[str, float] = field(default_factory=dict)
    derived: Derived | None = None
    module: str = ""

    def __call__(self, *args: Any, **params: Any) -> Any:
        return self.call(*args, **params)

    def __str__(self) -> str:
        return f"{self.op}-{self.name}"


@dataclass(eq=False)
class Op:
    """An op: inputs, parameters, outputs, cases, and the providers registered on it.

    inputs: declared tensors by name, in the order of the reference's arguments.
    outputs: declared tensors by name (a bare shape string will do); empty for in-place ops.
    params: keyword parameters and their defaults.
    cases: shapes for the correctness suite; the first one is also used for the layout and
        value variants, so it should be small and general.
    timed: shapes for the performance suite, from small to large; where there is no GPU only the
        first is timed, elsewhere all others.
    extremes: named overrides of input distributions; each is a case of its own.
    dtypes: the floating-point dtypes its cases cover.
    calls: how many successive calls are compared (in-place ops: more than one).
    tolerances: metric -> ratio to a stored baseline that a comparison allows, where not the
        usual one (`tinyllama.harness.records.verdict`).
    slowdowns: metric -> the slowdown (0.02: 2%) that the gate may not call SAME, where not the
        usual one (`tinyllama.harness.gate.subject`).
    bytes, flops: dims -> the fewest bytes moved (at an element size) and the operations
        done, for "forward" and "backward"; the source of every bandwidth and roofline.
    """

    name: str
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Any]  # given as Tensor or shape string, held as Tensor
    cases: Sequence[Case]
    params: Mapping[str, Any] = field(default_factory=dict)
    timed: Sequence[Case] = ()
    extremes: Mapping[str, Mapping[str, Values]] = field(default_factory=dict)
    calls: int = 1
    dtypes: tuple[torch.dtype, ...] = FLOATS
    bytes: Mapping[str, Callable[..., float]] = field(default_factory=dict)
    flops: Mapping[str, Callable[..., float]] = field(default_factory=dict)
    tolerances: Mapping[str, float] = field(default_factory=dict)
    slowdowns: Mapping[str, float] = field(default_factory=dict)
    providers: dict[str, Provider] = field(default_factory=dict, init=False)
    independents: dict[str, Callable[..., Any]] = field(default_factory=dict, init=False)
    magnitudes: Callable[..., Mapping[str, torch.Tensor]] | None = field(default=None, init=False)
    module: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self.module = _asking()
        self.outputs = {
            name: Tensor(out) if isinstance(out, str) else out for name, out in self.outputs.items()
        }
        _check(self)

    # -- what a file adds to its declaration ------------------------------------------------

    def reference(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register the ``eager`` provider; run in float64 it is the oracle."""
        self.provider("eager")(function)
        return function

    def provider(self, name: str, **traits: Any) -> Callable[[Any], Any]:
        """Register an implementation: a function that autograd can differentiate, or a class
        with ``forward`` and ``backward`` (see `tinyllama.harness.declare.autograd`)."""
        _require(bool(_NAME.match(name)), self.name, f"provider name {name!r}: use lower_case")
        _require(
            name not in self.providers,
            self.name,
            f"provider {name!r} is registered twice: pick another name",
        )

        module = _asking()

        def register(implementation: Any) -> Any:
            derived = derive(self, name, implementation, traits)
            call = implementation if derived is None else derived.call
            if derived is not None:
                traits.setdefault("double_backward", False)
            signature_of = implementation if derived is None else implementation.forward
            _check_signature(self, name, signature_of)
            traits.setdefault("dtypes", self.dtypes)
            self.providers[name] = Provider(
                self.name, name, call, derived=derived, module=module, **traits
            )
            return implementation

        return register

    def independent(self, source: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register code that is not ours and computes the same; it checks the reference."""

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            _check_signature(self, source, function)
            self.independents[source] = function
            return function

        return register

    def magnitude(self, function: Callable[..., Mapping[str, torch.Tensor]]) -> Callable[..., Any]:
        """Register the magnitude of the terms that are summed into a result: the root of
        the sum of their squares.

        It takes the inputs by name (float64), ``upstream`` (a dict of gradients by output
        name) and the parameters, and returns for names such as ``"o"`` or ``"grad q"`` a
        tensor of that result's shape. Only results that can cancel to (nearly) zero, in a
        way that perturbed inputs do not show, need one.
        """
        self.magnitudes = function
        return function

    # -- use --------------------------------------------------------------------------------

    def __getitem__(self, provider: str) -> Provider:
        if provider not in self.providers:
            raise ValueError(
                f"{self.name} has no provider {provider!r}: use one of {', '.join(self.providers)}"
            )
        return self.providers[provider]

    def __call__(self, *args: Any, provider: str = "eager", **params: Any) -> Any:
        """Run a provider on checked inputs.

        Raises ValueError when a shape or dtype contradicts the declaration.
        """
        self.check_arguments(args, params)
        return self[provider](*args, **params)

    def check_arguments(self, args: Sequence[Any], params: Mapping[str, Any]) -> dict[str, Any]:
        """Match arguments against the declaration and return the sizes of the dimensions."""
        if len(args) != len(self.inputs):
            raise ValueError(
                f"{self.name} takes {len(self.inputs)} tensors ({', '.join(self.inputs)}), "
                f"got {len(args)}"
            )
        for name in params:
            if name not in self.params:
                raise ValueError(
                    f"{self.name} has no parameter {name!r}: use {', '.join(self.params) or 'none'}"
                )
        dims: dict[str, Any] = {}
        for (name, declared), value in zip(self.inputs.items(), args, strict=True):
            values = value if declared.many else [value]
            for entry, tensor in enumerate(values):
                _match(self.name, name, declared, tensor, dims, entry if declared.many else None)
        return dims

    @property
    def mutated(self) -> tuple[str, ...]:
        return tuple(name for name, tensor in self.inputs.items() if tensor.mutated)

    @property
    def differentiable(self) -> tuple[str, ...]:
        return tuple(name for name, tensor in self.inputs.items() if tensor.grad)


def _asking() -> str:
    """The module from which this file is called."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


def _match(
    op: str, name: str, declared: Tensor, tensor: Any, dims: dict[str, Any], entry: int | None
) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{op}: {name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dim() != len(declared.axes):
        raise ValueError(
            f"{op}: {name} has shape {tuple(tensor.shape)}, expected ({declared.shape})"
        )
    if declared.dtype is not None and tensor.dtype not in (declared.dtype, torch.float64):
        raise ValueError(f"{op}: {name} has dtype {tensor.dtype}, expected {declared.dtype}")
    for axis, size in zip(declared.axes, tensor.shape, strict=True):
        key = axis if entry is None else f"{axis}[{entry}]"
        if dims.setdefault(key, size) != size:
            raise ValueError(
                f"{op}: {name} has {axis} = {size}, other inputs have {axis} = {dims[key]}"
            )


def _require(condition: bool, op: str, message: str) -> None:
    if not condition:
        raise DeclarationError(f"op {op!r}: {message}")


def _check(op: Op) -> None:
    """Refuse a declaration that contradicts itself, before anything is registered."""
    _require(bool(_NAME.match(op.name)), op.name, "name an op in lower_case")
    _require(bool(op.cases), op.name, "declare at least one case")
    _require(
        bool(op.outputs) != bool(op.mutated),
        op.name,
        "declare outputs, or inputs with mutated=True, and not both",
    )
    _require(not set(op.inputs) & set(op.params), op.name, "an input and a parameter share a name")
    known = {axis for tensor in op.inputs.values() for axis in tensor.axes}
    for name, output in op.outputs.items():
        missing = set(output.axes) - known
        _require(not missing, op.name, f"output {name!r} has unknown dimensions {sorted(missing)}")
    for name, tensor in {**op.inputs, **op.outputs}.items():
        _require(tensor.dtype_of is None, op.name, f"{name!r}: dtype_of is for what is saved")
    for name, tensor in op.inputs.items():
        floating = tensor.dtype is None or tensor.dtype.is_floating_point
        _require(
            floating or not tensor.grad, op.name, f"input {name!r} is integral, it has no grad"
        )
        _require(
            not (tensor.mutated and tensor.grad), op.name, f"input {name!r} is mutated: grad=False"
        )
    for case in [*op.cases, *op.timed]:
        missing = known - set(case.dims)
        _require(not missing, op.name, f"case {case} lacks dimensions {sorted(missing)}")
        unknown = set(case.params) - set(op.params)
        _require(not unknown, op.name, f"case {case} sets unknown parameters {sorted(unknown)}")
        unknown = set(case.values) - set(op.inputs)
        _require(not unknown, op.name, f"case {case} sets values of unknown {sorted(unknown)}")
    for name, overrides in op.extremes.items():
        unknown = set(overrides) - set(op.inputs)
        _require(not unknown, op.name, f"extreme {name!r} overrides unknown {sorted(unknown)}")


def _check_signature(op: Op, provider: str, function: Callable[..., Any]) -> None:
    """Inputs come first and in order, parameters by name: a swapped pair must not register.

    An argument may carry its shape as a suffix: ``x_BTD`` is the input ``x``.
    """
    got = list(inspect.signature(function).parameters)
    expected = [*op.inputs, *op.params]
    same = len(got) == len(expected) and all(
        re.fullmatch(rf"{want}(_[A-Z][A-Za-z0-9]*)?", name)
        for name, want in zip(got, expected, strict=True)
    )
    _require(
        same,
        op.name,
        f"{provider!r} takes ({', '.join(got)}), declared are ({', '.join(expected)})",
    )
