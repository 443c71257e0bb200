"""What an op is: a declaration from which every test, timing and table follows.

An op is declared once, in one file, as data plus a reference. Its providers are
implementations of the same mathematics (``eager``, ``torch``, ``triton``, ...); the
reference, run in float64, is the oracle that all of them are held to.
"""

import functools
import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tinyllama.harness.declare.arguments import spread
from tinyllama.harness.declare.autograd import derive
from tinyllama.harness.declare.checked import checked, of_dtypes, on_one_device
from tinyllama.harness.declare.offsets import ManyPrograms, RowsApart
from tinyllama.harness.declare.provider import MOST_SLACK, Provider, RandomDims, StepChoices
from tinyllama.harness.declare.specs import (
    FLOATS,
    STANDARD,
    TIMED_LAYOUTS,
    Case,
    DeclarationError,
    Signature,
    Tensor,
    Terms,
    add_derived,
    names_in,
    size_of,
)
from tinyllama.harness.declare.values import Values

_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")
_KNOWN_DIMENSIONS = (
    "use those of the inputs, numbers, and sums, products and quotients of these ('N 2', 'N D/2'); "
    "for a parameter k, Tensor('N 2', shape_by=lambda params: f'N {params[\"k\"]}')"
)
_SUFFIX = re.compile(r"_[A-Z][A-Za-z0-9]*\Z")
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
    tolerances: metric -> ratio to a stored baseline that a comparison allows, if not the default
        (`tinyllama.harness.records.verdict`).
    slowdowns: metric -> the slowdown (0.02: 2%) that the gate may not call SAME, if not the
        default (`tinyllama.harness.gate.subject`).
    small_kernels: kernels, by the function's name, that see no tensor of more than 2^31 elements
        however large the inputs are, and why; or an argument of one, ``kernel.argument``.

    Raises DeclarationError for a declaration that contradicts itself.
    """

    cases: Sequence[Case]
    timed: Sequence[Case] = ()
    extremes: Mapping[str, Mapping[str, Values]] = field(default_factory=dict)
    calls: int = 1
    dtypes: tuple[torch.dtype, ...] = FLOATS
    bytes: Mapping[str, Callable[..., float]] = field(default_factory=dict)
    flops: Mapping[str, Callable[..., float]] = field(default_factory=dict)
    tolerances: Mapping[str, float] = field(default_factory=dict)
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
    rows: dict[str, RowsApart] = field(default_factory=dict, init=False)
    programs: dict[str, ManyPrograms] = field(default_factory=dict, init=False)
    dims_of: RandomDims | None = field(default=None, init=False)
    asks: dict[str, StepChoices] = field(default_factory=dict, init=False)
    module: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self.module = _calling_module()
        self.outputs = {
            name: Tensor(out) if isinstance(out, str) else out for name, out in self.outputs.items()
        }
        _check(self)
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
        _require(bool(_NAME.match(name)), self.name, f"provider name {name!r}: use lower_case")
        _require(
            name not in self.providers,
            self.name,
            f"provider {name!r} is registered twice: pick another name",
        )

        module = _calling_module()

        def register(implementation: Any) -> Any:
            traits.setdefault("dtypes", self.dtypes)
            _check_traits(self, name, traits)
            derived = derive(self, name, implementation, traits)
            if derived is None:
                call = spread(implementation, self.params)
                _check_signature(self, name, call)
            else:
                traits.setdefault("double_backward", False)
                _check_signature(self, name, derived.forward)
            # An op in place takes lists of any shape, and its provider checks them.
            check = functools.partial(self.check, provider=name)
            checks = not self.mutated and bool(derived or "triton" in traits.get("requires", ()))
            if derived is not None:
                call = derived.caller(check) if checks else derived.caller()
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
            _check_signature(self, source, call)
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

    def step_choices(self, provider: str) -> Callable[[StepChoices], StepChoices]:
        """Register a function that asks the chip's table what a training step asks before it calls
        this provider; ``tune --show`` prints it. Arguments: the first input, on the meta device,
        and the dtype of products."""

        def register(function: StepChoices) -> StepChoices:
            self.asks[provider] = function
            return function

        return register

    def rows_apart(self, function: RowsApart) -> RowsApart:
        """Register a function that launches kernels on rows that lie 2^30 elements apart.

        It takes ``put`` (see `tinyllama.harness.declare.offsets.Put`) and returns the results,
        which must be, bit for bit, those of dense tensors.
        """
        self.rows[function.__name__] = function
        return function

    def many_programs(self, function: ManyPrograms) -> ManyPrograms:
        """Register a function that launches kernels on tensors of 2^31 elements, of which the
        first and the last programs run; it takes and calls an
        `tinyllama.harness.declare.offsets.Ends`.
        """
        self.programs[function.__name__] = function
        return function

    @property
    def folder(self) -> Path | None:
        """The folder that the op is declared in; None where it is one file."""
        file = Path(str(sys.modules[self.module].__file__))
        return file.parent if file.name == "__init__.py" else None

    # -- use --------------------------------------------------------------------------------

    def __getitem__(self, provider: str) -> Provider:
        if provider not in self.providers:
            raise ValueError(
                f"{self.name} has no provider {provider!r}: use one of {', '.join(self.providers)}"
            )
        return self.providers[provider]

    def __call__(self, *args: Any, provider: str = "eager", **params: Any) -> Any:
        """Run a provider on checked inputs.

        Raises ValueError when a shape, a dtype, a device or a parameter contradicts the
        declaration.
        """
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
        on_one_device(self.name, tensors)
        if provider is not None:
            usual = [(name, x) for name, x in tensors if self.inputs[name].dtype is None]
            of_dtypes(f"{self.name}-{provider}", usual, self.providers[provider].dtypes)

    def misfit(self, dims: Mapping[str, Any], params: Mapping[str, Any]) -> str | None:
        """What `fits` says is wrong with these sizes and parameters, or what it raises."""
        try:
            return self.fits({**self.numbers(dims), **self.params, **params})
        except Exception as error:  # as of a remainder by a parameter of zero
            return f"its sizes and parameters do not fit: {type(error).__name__}: {error}"

    def check_arguments(self, args: Sequence[Any], params: Mapping[str, Any]) -> dict[str, Any]:
        """Match arguments against the declaration and return the sizes of the dimensions."""
        if len(args) != len(self.inputs):
            raise ValueError(
                f"{self.name} takes {len(self.inputs)} tensors ({', '.join(self.inputs)}), "
                f"got {len(args)}{self._instead}"
            )
        for name in params:
            if name not in self.params:
                known = ", ".join(self.params) or "none"
                raise ValueError(
                    f"{self.name} has no parameter {name!r}: use {known}{self._instead}"
                )
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
                        raise ValueError(
                            f"{self.name}: {name} has {axis} = {size}, other inputs have {axis} = "
                            f"{dims[key]}"
                        )
        add_derived(dims, [(axis, size) for _, axis, size in computed])
        for name, axis, size in computed:
            if names_in(axis) - dims.keys() or size_of(axis, dims) != size:
                known = {one: dims[one] for one in sorted(names_in(axis) & dims.keys())}
                sizes = "".join(f" and {one} = {length}" for one, length in known.items())
                raise ValueError(f"{self.name}: {name} has {axis} = {size}{sizes}: they do not fit")
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
        raise ValueError(
            f"{op.name}: {name} has shape {tuple(tensor.shape)}, expected ({declared.shape})"
        )
    if declared.dtype is not None and tensor.dtype not in (declared.dtype, torch.float64):
        raise ValueError(f"{op.name}: {name} has dtype {tensor.dtype}, expected {declared.dtype}")
    return sizes


def _without_optional(op: Op) -> list[Case]:
    """The first case without each optional input, and without all; those that none declares."""
    optional = [name for name, tensor in op.inputs.items() if tensor.optional]
    absent = [(name,) for name in optional]
    absent += [tuple(optional)] if len(optional) > 1 else []
    declared = [case.without for case in op.cases]
    return [op.cases[0].lacking(*names) for names in absent if names not in declared]


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
    for name, tensor in op.inputs.items():
        if wrong := _wrong_input(tensor, first=name == next(iter(op.inputs))):
            raise DeclarationError(f"op {op.name!r}: input {name!r} {wrong}")
    for name, tensor in {**op.inputs, **op.outputs}.items():
        _require(tensor.dtype_of is None, op.name, f"{name!r}: dtype_of is for what is saved")
        integral = not tensor.floating and name in op.outputs
        text = f"{name!r}: off_by is for integral outputs"
        _require(integral or not tensor.off_by, op.name, text)
    leads = len(op.leading)
    first = next(iter(op.inputs.values()))
    text = f"leading {op.leading}: they are not the first of its first input"
    _require(first.axes[:leads] == op.leading, op.name, text)
    _check_dimensions(op)
    _check_cases(op)
    for layout, bar in op.layouts.items():
        right = layout in TIMED_LAYOUTS and isinstance(bar, (int, float)) and 1 < bar < math.inf
        text = f"layouts of {layout!r}: {bar!r}: give {' or '.join(TIMED_LAYOUTS)} a number above 1"
        _require(right, op.name, text)


def _wrong_input(tensor: Tensor, first: bool) -> str:
    """What is wrong with an input by itself, in words; else "". first: it is the op's first."""
    if tensor.grad and not tensor.floating:
        return "is integral, it has no grad"
    if tensor.values is STANDARD and not tensor.floating:
        kinds = "integers(high) of tinyllama.harness.values (2 for booleans)"
        return f"is {tensor.dtype}: give it values=, such as {kinds}"
    if tensor.mutated and tensor.grad:
        return "is mutated: grad=False"
    if tensor.optional and (first or tensor.mutated or tensor.many):
        return "is optional: neither the first input nor one that is mutated or a list may be"
    if tensor.many and not all(axis.isidentifier() for axis in tensor.axes):
        return f"is a list of tensors ({tensor.shape}): each axis is a dimension's name"
    return ""


def _check_dimensions(op: Op) -> None:
    """Each dimension of an output, and of a computed axis, is told by the inputs of a call."""
    always = [tensor for tensor in op.inputs.values() if not tensor.optional]
    told = {axis for tensor in always for axis in tensor.axes if axis.isidentifier()}
    sizes: dict[str, Any] = dict.fromkeys(told, 1)
    computed = {axis for tensor in always for axis in tensor.axes if not axis.isidentifier()}
    add_derived(sizes, [(axis, size_of(axis, _Ones())) for axis in sorted(computed)])
    for name, tensor in op.inputs.items():
        missing = set[str]().union(*map(names_in, tensor.axes)) - set(sizes)
        free = missing - set(tensor.axes) if tensor.optional else missing
        text = f"input {name!r} ({tensor.shape}) does not tell the size of {sorted(missing)}: "
        _require(not free, op.name, f"{text}give an input that axis alone, or a multiple of it")
    for params in ({}, *(case.params for case in [*op.cases, *op.timed])):
        for name, output in op.outputs_for(params).items():
            missing = set[str]().union(*map(names_in, output.axes)) - set(sizes)
            text = f"output {name!r} has unknown dimensions {sorted(missing)}: {_KNOWN_DIMENSIONS}"
            _require(not missing, op.name, text)


class _Ones(dict[str, int]):
    """Sizes of which each is 1."""

    def __missing__(self, name: str) -> int:
        return 1


def _check_cases(op: Op) -> None:
    """Each case has the op's dimensions, and names no input or parameter that it lacks."""
    axes = [axis for tensor in op.inputs.values() for axis in tensor.axes]
    needed = set[str]().union(*map(names_in, axes))
    optional = {name for name, tensor in op.inputs.items() if tensor.optional}
    for case in op.timed:
        several = any(isinstance(case.dims.get(name), tuple) for name in op.leading)
        text = f"timed case {case}: give each leading dimension one size"
        _require(not several, op.name, text)
    for case in [*op.cases, *op.timed]:
        for what, names in {
            "lacks dimensions": needed - set(case.dims),
            "sets unknown parameters": set(case.params) - set(op.params),
            "sets values of unknown": set(case.values) - set(op.inputs),
            "is without what is not optional:": set(case.without) - optional,
        }.items():
            _require(not names, op.name, f"case {case} {what} {sorted(names)}")
    for name, overrides in op.extremes.items():
        unknown = set(overrides) - set(op.inputs)
        _require(not unknown, op.name, f"extreme {name!r} overrides unknown {sorted(unknown)}")


def _check_traits(op: Op, provider: str, traits: Mapping[str, Any]) -> None:
    """The traits of a provider name what its op has, and its slack is one."""
    known = {
        "overwrites": [*op.inputs, *op.outputs],
        "frozen": op.differentiable,
        "output_dtypes": op.outputs,
    }
    for trait, names in known.items():
        for name in traits.get(trait, ()):
            text = f"{trait} of {provider!r} names {name!r}: use {', '.join(names) or 'none'}"
            _require(name in names, op.name, text)
    for dtype, slack in traits.get("slack", {}).items():
        text = f"slack of {provider!r} is {slack} for {dtype}: use 0 to {MOST_SLACK:.0f}"
        _require(0 < slack <= MOST_SLACK, op.name, text)


def _check_signature(op: Op, provider: str, function: Callable[..., Any]) -> None:
    """Inputs come first and in order, parameters by name: a swapped pair must not register.

    An argument may carry its shape as a suffix: ``x_BTD`` is the input ``x``. What else has a
    default may be there too, and is left at it.
    """
    parameters = inspect.signature(function).parameters
    declared = [*op.inputs, *op.params]
    names = [name if name in declared else _SUFFIX.sub("", name) for name in parameters]
    needed = [one.default is inspect.Parameter.empty for one in parameters.values()]
    pairs = zip(names, needed, strict=True)
    same = [name for name, need in pairs if need or name in declared] == declared
    text = f"{provider!r} takes ({', '.join(parameters)}), declared are ({', '.join(declared)})"
    _require(same, op.name, text)
