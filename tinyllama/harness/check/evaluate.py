"""Running an op on a case: inputs, outputs, gradients, and inputs that must not change.

The provider under test, the eager reference in the case's dtype, and the oracle in float64 all
get the same inputs, rounded to that dtype. So rounding the inputs is no error of the oracle, and
eager's error is what the dtype costs a straightforward implementation.
"""

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tinyllama.harness.check.layouts import REPEATING, laid_out
from tinyllama.harness.declare.autograd import several
from tinyllama.harness.declare.op import Op
from tinyllama.harness.declare.specs import FLOATS, Case, Tensor, shape_of
from tinyllama.harness.declare.values import Values, normal

Leaves = dict[str, Any]  # input name -> tensor, or list of tensors for a `many` input
Place = Callable[[Any, str], Any]  # what an argument is made of, and its name -> the argument


_KEEPS_FLOAT64 = (
    ": the reference also runs in float64, as the oracle, and must stay in it: compute in "
    "torch.promote_types(x.dtype, torch.float32)"
)
_RAISED_BY = "_raised_by"  # an attribute of an exception


@contextlib.contextmanager
def raising(culprit: str) -> Iterator[None]:
    """Mark what is raised within as an error of this culprit, which `raised_by` then returns. "" is
    the candidate, whose errors are not marked."""
    try:
        yield
    except BaseException as error:
        if culprit:
            setattr(error, _RAISED_BY, culprit)
        raise


def raising_in(op: Op, call: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """`raising`, for a call of an implementation, which may be the reference."""
    eager = op.providers.get("eager")
    return raising("the reference" if eager is not None and call is eager.call else "")


def raised_by(error: BaseException) -> str:
    """Whose error it is, in words, where it is not the candidate's; else ""."""
    return str(getattr(error, _RAISED_BY, ""))


class ContractError(AssertionError):
    """A call that does not do what its op declares."""


class OutputError(ContractError):
    """Outputs of another number, type, shape or dtype than declared."""


class GradientError(ContractError):
    """A gradient that is missing, or has another shape or dtype than its input."""


class ChangedInputError(ContractError):
    """A call that wrote into inputs, or into upstream gradients, without declaring it.

    forward, backward: which ones its passes changed, in words.
    """

    def __init__(self, op: str, forward: Sequence[str], backward: Sequence[str]) -> None:
        self.forward, self.backward = forward, backward
        passes = {"forward": forward, "backward": backward}
        texts = [f"{key} changed {' and '.join(names)}" for key, names in passes.items() if names]
        super().__init__(f"{op}: {'; '.join(texts)}")


@dataclass(frozen=True)
class Inputs:
    """Inputs of one call: ``args`` by name, upstream gradients by output, parameters.

    wanted: the inputs whose gradients are asked for; None: all that have one.
    """

    args: Leaves
    upstream: dict[str, torch.Tensor | None]
    params: dict[str, Any]
    fresh: list[Leaves] = field(default_factory=list)
    wanted: tuple[str, ...] | None = None

    def dense(self) -> "Inputs":
        """The same values without gaps: torch's own product of bfloat16 on a CPU reads what lies
        in between (torch 2.13)."""
        return self.mapped(lambda value: value.contiguous())

    def double(self) -> "Inputs":
        """The same values in float64."""
        return self.to(torch.float64)

    def to(self, dtype: torch.dtype) -> "Inputs":
        """The same values rounded to a dtype."""
        return self.mapped(lambda value: value.to(dtype))

    def perturbed(self, seed: int) -> "Inputs":
        """In float64, every value moved at random by up to half a unit of its dtype's last
        place: what rounding the inputs once more would do. Parameters move by float32's:
        that is what a kernel receives (1 - 0.999 in float32 is off by 1.3e-5)."""
        generators: dict[torch.device, torch.Generator] = {}

        def move(value: torch.Tensor) -> torch.Tensor:
            if value.device not in generators:
                generators[value.device] = torch.Generator(value.device).manual_seed(seed)
            half = torch.empty_like(value, dtype=torch.float64)
            half.uniform_(-0.5, 0.5, generator=generators[value.device])
            return value.double() * (1 + torch.finfo(value.dtype).eps * half)

        params = {
            name: move(torch.tensor(value)).item() if isinstance(value, float) else value
            for name, value in self.params.items()
        }
        return replace(self.mapped(move), params=params)

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Inputs":
        """Each floating-point tensor changed so."""

        def apply(value: Any) -> Any:
            if isinstance(value, list):
                return [apply(item) for item in value]
            if value is None or not value.dtype.is_floating_point:
                return value
            return change(value)

        return Inputs(
            {name: apply(value) for name, value in self.args.items()},
            {name: apply(value) for name, value in self.upstream.items()},
            self.params,
            [{name: apply(value) for name, value in call.items()} for call in self.fresh],
            self.wanted,
        )


def make_inputs(
    op: Op,
    case: Case,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    seed: int = 0,
    extreme: str | None = None,
    layout: str = "contiguous",
    upstream: str = "contiguous",
    drawn_on: torch.device | str = "cpu",
) -> Inputs:
    """Inputs of a case, equal on every device for one seed.

    drawn_on: the device that draws random values. Each device draws other ones; a GPU is faster.
    extreme: the name of one of the op's extremes.
    layout: of the inputs, one of `layouts.LAYOUTS`; with "distinct", no two tensors have the same
        strides. The gaps between elements hold NaN; those between integers 0, a valid index too.
    upstream: layout of the gradients of the outputs, one of `layouts.UPSTREAMS`; "summed" is what
        ``.sum().backward()`` gives: one element, with stride 0, for the whole tensor.
    """
    overrides = {**case.values, **(op.extremes[extreme] if extreme else {})}

    first = next(iter(op.inputs.values())).axes[:1]

    def dtype_of(declared: Tensor) -> torch.dtype:
        fixed = declared.dtype or dtype
        return torch.float64 if dtype is torch.float64 and declared.floating else fixed

    def layout_of(declared: Tensor) -> str:
        if declared.mutated and layout in REPEATING:  # elements that share memory cannot be written
            return "contiguous"
        # Equal rows of a weight would make results cancel; only the batch is expanded.
        return "contiguous" if layout == "expanded" and declared.axes[:1] != first else layout

    place = itertools.count(1)

    def leaf(name: str, declared: Tensor, salt: str = "") -> Any:
        if name in case.without:
            return None
        values = overrides.get(name) or declared.distribution(case.dims)
        key = f"{op.name}|{case}|{name}|{salt}"
        tensors = [
            laid_out(
                sampled(name, values, shape, f"{key}|{i}|{seed}", drawn_on),
                dtype_of(declared),
                device,
                layout_of(declared),
                next(place),
            )
            for i, shape in enumerate(shapes_of(declared, case.dims))
        ]
        return tensors if declared.many else tensors[0]

    grads: dict[str, torch.Tensor | None] = {}
    upstream_place = itertools.count(1 + len(op.inputs))
    for name, output in op.outputs_for(case.params).items():
        if not output.floating:
            grads[name] = None
            continue
        (shape,) = shapes_of(output, case.dims)
        sample = sampled(name, normal(), shape, f"{op.name}|{case}|d{name}|{seed}", drawn_on)
        grads[name] = laid_out(sample, dtype_of(output), device, upstream, next(upstream_place))

    names = [name for name, declared in op.inputs.items() if not declared.mutated]
    return Inputs(
        {name: leaf(name, declared) for name, declared in op.inputs.items()},
        grads,
        {**op.params, **case.params},
        [
            {name: leaf(name, op.inputs[name], f"call {call}") for name in names}
            for call in range(1, op.calls)
        ],
    )


def evaluate(
    op: Op,
    call: Callable[..., Any],
    inputs: Inputs,
    overwrites: Collection[str] = (),
    *,
    place: Place | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
    watched: bool = True,
) -> dict[str, torch.Tensor]:
    """Run forward and backward and return every result by name.

    Outputs keep their names, gradients are ``"grad x"``, mutated inputs their own name
    (``"param[0]"`` for lists). An input that no gradient reaches has no entry.
    overwrites: the inputs that backward may leave changed, and the outputs whose upstream gradient
        it may.
    place: makes the argument of an input, or of an upstream gradient, and is told its name; a copy
        with the same strides by default.
    dtypes: of outputs, where they are not as the op declares.
    watched: False if the call was watched on other inputs, and these inputs are for it alone. It
        then gets the inputs themselves, not copies, and may change them unnoticed.

    Raises a `ContractError`: ChangedInputError for an input or upstream gradient that is not
    declared mutated, OutputError and GradientError for results that are not as declared. What the
    reference raises is noted as its own (`raised_by`).
    """
    with raising_in(op, call):
        placed = place or (lambda value, name: copied(value) if watched else value)
        args = {name: placed(value, name) for name, value in inputs.args.items()}
        unchanged = [name for name in args if watched and name not in op.mutated]
        before = {name: copied(args[name]) for name in unchanged}
        for name in _wanted(op, inputs):
            args[name].requires_grad_(True)

        outputs = call(*args.values(), **inputs.params)
        forward, backward = _changed(args, before), list[str]()
        forward += _flagged(op, inputs, args, unchanged)
        between = {
            name: copied(args[name]) if f"its input {name}" in forward else value
            for name, value in before.items()
            if name not in overwrites
        }
        try:
            results = _named_outputs(op, outputs, args, inputs.params, dtypes or {})
            if op.differentiable:
                free = [*overwrites, *(() if watched else op.outputs)]
                results |= backward_pass(op, results, args, inputs, free, placed, backward)
                backward = _changed(args, between) + backward
        except Exception as error:
            if forward or backward:
                raise ChangedInputError(op.name, forward, backward) from error
            raise
        if forward or backward:
            raise ChangedInputError(op.name, forward, backward)
        for fresh in inputs.fresh:
            call(*{**args, **fresh}.values(), **inputs.params)
        if op.mutated:
            return mutated_results(op, args)
        return {name: value.detach() for name, value in results.items()}


def is_gradient(name: str) -> bool:
    """Whether a result of `evaluate` is the gradient of an input."""
    return name.startswith("grad ")


def backward_pass(
    op: Op,
    results: Mapping[str, torch.Tensor],
    args: Leaves,
    inputs: Inputs,
    overwrites: Collection[str],
    placed: Place,
    changed: list[str],
) -> dict[str, torch.Tensor]:
    """The gradients by name, ``"grad x"``; raises as `evaluate` does.

    changed: gets the upstream gradients that were changed, in words.
    """
    upstream = {name: g for name, g in inputs.upstream.items() if g is not None}
    detached = sorted(name for name in upstream if not results[name].requires_grad)
    if inputs.wanted is not None:  # an output need not depend on each input
        upstream = {name: g for name, g in upstream.items() if name not in detached}
        if not upstream:
            return {}
    elif detached:
        raise GradientError(f"{op.name}: outputs {detached} are detached from the inputs")
    upstream = {name: placed(gradient, f"grad {name}") for name, gradient in upstream.items()}
    before = {name: copied(g) for name, g in upstream.items() if name not in overwrites}
    names = _wanted(op, inputs)
    gradients: Sequence[torch.Tensor | None] = torch.autograd.grad(
        [results[name] for name in upstream],
        [args[name] for name in names],
        list(upstream.values()),
        allow_unused=True,
    )
    for name, copy in before.items():
        if not same_memory(copy, upstream[name]):
            changed.append(f"the upstream gradient of {name}")
    by_name = {}
    for name, gradient in zip(names, gradients, strict=True):
        if gradient is None:
            continue
        for trait in ("shape", "dtype"):
            got, expected = getattr(gradient, trait), getattr(args[name], trait)
            if got != expected:
                raise GradientError(f"{op.name}: grad {name} has {trait} {got}, not {expected}")
        by_name[f"grad {name}"] = gradient
    return by_name


def _wanted(op: Op, inputs: Inputs) -> list[str]:
    present = [name for name in op.differentiable if inputs.args[name] is not None]
    return [name for name in present if inputs.wanted is None or name in inputs.wanted]


def _named_outputs(
    op: Op, outputs: Any, args: Leaves, params: Mapping[str, Any], dtypes: Mapping[str, torch.dtype]
) -> dict[str, torch.Tensor]:
    if not op.outputs:
        if outputs is not None:
            raise OutputError(f"{op.name} works in place and must return None")
        return {}
    values = several(outputs)
    if len(values) != len(op.outputs):
        raise OutputError(f"{op.name} returned {len(values)} outputs, not {len(op.outputs)}")
    dims = op.check_arguments(list(args.values()), {})
    tensors = [value for value in args.values() if isinstance(value, torch.Tensor)]
    first = next((x for x in tensors if x.is_floating_point()), tensors[0])
    for (name, declared), value in zip(op.outputs_for(params).items(), values, strict=True):
        if type(value) is not torch.Tensor:
            raise OutputError(f"{op.name}: {name} is a {type(value).__name__}, not a torch.Tensor")
        shape = tuple(shape_of(declared.axes, dims))
        widened = declared.floating and first.dtype not in FLOATS  # the oracle's
        fixed = declared.dtype if declared.dtype and not widened else first.dtype
        dtype = dtypes.get(name, fixed)
        for trait, got, expected in (
            ("shape", tuple(value.shape), shape),
            ("dtype", value.dtype, dtype),
        ):
            if got != expected:
                advice = _KEEPS_FLOAT64 if expected is torch.float64 else ""
                raise OutputError(f"{op.name}: {name} has {trait} {got}, not {expected}{advice}")
    return dict(zip(op.outputs, values, strict=True))


def mutated_results(op: Op, args: Leaves) -> dict[str, torch.Tensor]:
    """What an in-place op has written, by name; the entries of a list are numbered."""
    results = {}
    for name in op.mutated:
        if isinstance(args[name], list):
            results.update({f"{name}[{i}]": value for i, value in enumerate(args[name])})
        else:
            results[name] = args[name]
    return results


def _flagged(op: Op, inputs: Inputs, args: Leaves, names: Sequence[str]) -> list[str]:
    """The inputs that want a gradient after a call, or no longer, in words."""
    wanted = _wanted(op, inputs)
    return [
        f"requires_grad of its input {name}"
        for name in names
        if isinstance(args[name], torch.Tensor) and args[name].requires_grad is not (name in wanted)
    ]


def _changed(args: Leaves, before: Leaves) -> list[str]:
    """The inputs that are not as before, in words."""
    changed = []
    for name, old in before.items():
        pairs = zip(args[name], old, strict=True) if isinstance(old, list) else [(args[name], old)]
        if not all(same_memory(value, copy) for value, copy in pairs):
            changed.append(f"its input {name}")
    return changed


def leaves(args: Leaves) -> Iterator[torch.Tensor]:
    """The tensors among arguments, those in lists too."""
    for value in args.values():
        if value is not None:
            yield from value if isinstance(value, list) else [value]


def copied(value: Any) -> Any:
    """A copy in memory of its own with the same strides, gaps and all (clone() drops them)."""
    if value is None:  # an optional input
        return None
    if isinstance(value, list):
        return [copied(item) for item in value]
    storage = value.untyped_storage().clone()
    empty = torch.empty(0, dtype=value.dtype, device=value.device)
    return empty.set_(storage, value.storage_offset(), value.size(), value.stride())


def same_memory(x: torch.Tensor | None, y: torch.Tensor | None) -> bool:
    """Equal bit for bit, the gaps between strided elements included; or both absent."""
    if x is None or y is None:
        return x is y

    def raw(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)

    return torch.equal(raw(x), raw(y))


def shapes_of(declared: Tensor, dims: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """The shapes of an input in a case; more than one for an input declared ``many``."""
    if not declared.many:
        return [tuple(shape_of(declared.axes, dims))]
    sizes = [dims[axis] for axis in declared.axes]
    count = next(len(size) for size in sizes if isinstance(size, tuple))
    return [tuple(s[i] if isinstance(s, tuple) else s for s in sizes) for i in range(count)]


def without_values(op: Op, case: Case, dtype: torch.dtype) -> list[Any]:
    """The inputs of a case as tensors of the meta device, which have no values."""

    def empty(name: str, declared: Tensor) -> Any:
        if name in case.without:
            return None
        shapes = shapes_of(declared, case.dims)
        tensors = [torch.empty(x, dtype=declared.dtype or dtype, device="meta") for x in shapes]
        return tensors if declared.many else tensors[0]

    return [empty(name, declared) for name, declared in op.inputs.items()]


def sampled(
    name: str, values: Values, shape: tuple[int, ...], key: str, drawn_on: torch.device | str
) -> torch.Tensor:
    """Values of a tensor of this name. What the distribution raises is noted (`raised_by`)."""
    digest = hashlib.sha256(key.encode()).digest()
    generator = torch.Generator(drawn_on).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    with raising(f"the declared distribution of {name}"):
        return values.sample(shape, generator)
