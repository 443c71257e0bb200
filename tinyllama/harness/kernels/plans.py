"""Plans: what a function of tensors allocates and launches, found once and repeated for less.

A launch needs a configuration, a grid, strides and a compiled kernel, all of which follow from the
layouts of the tensors. `planned` runs a function once, sees its allocations, kernels and calls of
torch, and writes a Python function that repeats these alone:

    results, plan = planned(function, (x, weight))
    print(plan.source)
    plan.call(x2, weight2)     # the results for other tensors of the same layout

It is for functions whose steps depend on nothing but the layouts of their tensors: shapes, strides,
dtypes and the device. Whoever calls a plan must see to that; what the plan sees to is

- where the tensors begin: kernels are specialised for addresses that are multiples of 16;
- the device and the stream, which are those of the tensors and the current one at each call;
- whatever watches or changes launches (`tinyllama.harness.kernels.known.disturbed`).

In these cases the plan calls the function. There is no plan of a function that reads a value back
from the device, that copies an input to another layout, whose tensors share memory with each other,
or that launches a kernel which is not known for this chip.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tinyllama.harness.kernels import known, layout

_EMPTY = {"aten::empty", "aten::empty_like", "aten::empty_strided"} | {
    "aten::new_empty",
    "aten::new_empty_strided",
}


class _UnplannedError(Exception):
    """Why there is no plan of a function."""


class Plan(NamedTuple):
    """The steps of a function as a function of its own; None where there is none, and why."""

    call: Callable[..., Any] | None
    source: str = ""
    reason: str = ""


def planned(
    function: Callable[..., Sequence[torch.Tensor | None]], tensors: Sequence[torch.Tensor | None]
) -> tuple[Sequence[torch.Tensor | None], Plan]:
    """The results of ``function(*tensors)``, and its plan."""
    watch, before = _Watch(tensors), layout.copies
    with known.traced(watch.launched), watch:
        results = function(*tensors)
    try:
        if layout.copies != before:
            raise _UnplannedError("an input is copied to another layout")
        return results, watch.plan(results, function)
    except _UnplannedError as reason:
        return results, Plan(None, reason=str(reason))


class Repeated:
    """A function of tensors of one layout. On a GPU it is planned at its second call, since many
    layouts are seen once, and then the plan is put in its place; elsewhere it is called as it is.

    put: puts what is to be called from now on where this object was.
    """

    def __init__(
        self, function: Callable[..., Any], put: Callable[[Callable[..., Any]], None]
    ) -> None:
        self._function, self._put, self._met = function, put, False

    def __call__(self, *tensors: torch.Tensor | None) -> Any:
        if not self._met or known.disturbed():
            self._met = True
            return self._function(*tensors)
        index = next((tensor.get_device() for tensor in tensors if tensor is not None), -1)
        if index < 0 or not known.knows(index):
            self._put(self._function)
            return self._function(*tensors)
        results, plan = planned(self._function, tensors)
        self._put(self._function if plan.call is None else plan.call)
        return results


class _Called(NamedTuple):
    """A call of torch."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: torch.Tensor

    @property
    def empty(self) -> bool:
        """Whether it only takes memory."""
        return self.func.name().partition(".")[0] in _EMPTY


@dataclass
class _Place:
    """Memory that steps use: an argument's, or that of a tensor which is made by a step."""

    tensor: torch.Tensor
    name: str
    argument: bool
    whole: bool = False  # a step of torch's takes or makes the tensor itself
    results: list[torch.Tensor] = field(default_factory=list)


class _Watch(TorchDispatchMode):
    """Sees the calls of torch and, by `launched`, of kernels, in their order."""

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        super().__init__()
        self._alive: list[Any] = []  # or other tensors would get the same memory meanwhile
        self._places: dict[int, _Place] = {}
        self._steps: list[_Called | known.Known | None] = []
        self._wrong = ""
        self._count = len(tensors)
        for i, tensor in enumerate(tensors):
            if tensor is not None:
                self._place(tensor, f"t{i}", argument=True)

    def _place(self, tensor: torch.Tensor, name: str, *, argument: bool = False) -> _Place:
        memory = _memory(tensor)
        if memory in self._places:
            self._wrong = "tensors share memory"
        self._places[memory] = place = _Place(tensor, name, argument)
        self._alive.append(tensor)
        return place

    # -- what is seen ---------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._alive.append(result)
        if not isinstance(result, torch.Tensor):
            if any(isinstance(one, torch.Tensor) for one in (*args, *(kwargs or {}).values())):
                self._wrong = f"{func} gives no tensor"  # else it is of types alone
        elif _memory(result) in self._places:
            place = self._places[_memory(result)]
            if not func.is_view and func is not torch.ops.aten.detach.default:
                self._wrong = f"{func} writes to {place.name}"
        else:
            self._place(result, f"a{len(self._steps)}")
            self._steps.append(_Called(func, args, kwargs or {}, result))
        return result

    def launched(self, made: known.Known | None) -> None:
        """A kernel was launched; None: one that is not known by its signature."""
        self._alive.append(made)
        self._steps.append(made)

    # -- what is written ------------------------------------------------------------------------

    def plan(self, results: Sequence[torch.Tensor | None], function: Callable[..., Any]) -> Plan:
        if self._wrong:
            raise _UnplannedError(self._wrong)
        writer = _Writer(function)
        for result in results:
            if result is not None:
                self._at(result).results.append(result)
        for step in self._steps:
            if isinstance(step, _Called) and not step.empty:
                for one in (*_tensors_of(step), step.result):
                    self._at(one).whole = True
        used = {id(self._at(one)) for step in self._steps for one in _tensors_of(step)}
        used |= {id(place) for place in self._places.values() if place.results}
        body = [
            self._torch(writer, step) if isinstance(step, _Called) else self._launch(writer, step)
            for step in self._steps
            if not isinstance(step, _Called) or id(self._at(step.result)) in used
        ]
        given = ", ".join(self._given(writer, result) for result in results)
        return writer.plan(self._count, body, f"return ({given},)")

    def _at(self, tensor: torch.Tensor) -> _Place:
        place = self._places.get(_memory(tensor))
        if place is None:
            raise _UnplannedError("a tensor that is neither given nor made")
        return place

    def _torch(self, writer: _Writer, step: _Called) -> str:
        place = self._at(step.result)
        if step.empty:
            form = place.results[0] if self._is_result(place) else step.result
            like = next(
                (one for one in self._places.values() if one.argument and _alike(one.tensor, form)),
                None,
            )
            if like is not None:
                return f"{place.name} = empty_like({like.name})"
            layout = map(writer.constant, (tuple(form.shape), form.stride()))
            dtype, device = map(writer.constant, (form.dtype, form.device))
            options = f"dtype={dtype}, device={device}"
            return f"{place.name} = empty_strided({', '.join(layout)}, {options})"
        given = [self._whole(writer, one) for one in step.args]
        given += [f"{name}={self._whole(writer, one)}" for name, one in step.kwargs.items()]
        return f"{place.name} = {writer.constant(step.func)}({', '.join(given)})"

    def _is_result(self, place: _Place) -> bool:
        """Whether all memory of the place is one result's, in whose form it can be made at once."""
        if place.whole or len(place.results) != 1:
            return False
        (result,) = place.results
        size = result.untyped_storage().nbytes()
        dense = result.is_contiguous() and result.numel() * result.element_size() == size
        return dense and result.dtype is place.tensor.dtype

    def _whole(self, writer: _Writer, value: Any) -> str:
        if not isinstance(value, torch.Tensor):
            if _holds_tensors(value):
                raise _UnplannedError("a list of tensors")
            return writer.constant(value)
        place = self._at(value)
        if not _same_form(value, place.tensor):
            raise _UnplannedError(f"a view of {place.name} in a call of torch")
        return place.name

    def _given(self, writer: _Writer, result: torch.Tensor | None) -> str:
        if result is None:
            return "None"
        place = self._at(result)
        if place.argument:
            raise _UnplannedError(f"{place.name} is a result")
        if self._is_result(place) or _same_form(result, place.tensor):
            return place.name
        if result.dtype is not place.tensor.dtype:
            raise _UnplannedError(f"a result is {place.name} in another dtype")
        form = (tuple(result.shape), result.stride(), result.storage_offset())
        return f"{place.name}.as_strided({', '.join(map(writer.constant, form))})"

    def _launch(self, writer: _Writer, made: known.Known | None) -> str:
        if made is None:
            raise _UnplannedError("a kernel that Triton specialises at every launch")
        given = []
        for value in made.arguments:
            if isinstance(value, torch.Tensor):
                place = self._at(value)
                apart = value.data_ptr() - place.tensor.data_ptr()
                given.append(writer.address(place, apart))
            else:
                given.append(writer.constant(value))
        return writer.launch(made, given)


class _Writer:
    """Writes a plan's source. Addresses are taken once, where a place is first used."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._names: dict[str, Any] = {
            "function": function,
            "disturbed": known.disturbed,
            "empty_like": torch.empty_like,
            "empty_strided": torch.empty_strided,
        }
        self._given: dict[str, None] = {}  # arguments whose addresses are used
        self._made: dict[str, None] = {}
        self._gpu: int | None = None

    def constant(self, value: Any) -> str:
        if value is None or type(value) in (bool, int):
            return repr(value)
        name = f"c{len(self._names)}"
        self._names[name] = value
        return name

    def address(self, place: _Place, apart: int) -> str:
        if place.argument and place.tensor.data_ptr() % 16:
            raise _UnplannedError(f"{place.name} does not begin at a multiple of 16 bytes")
        (self._given if place.argument else self._made)[place.name] = None
        return f"{place.name}_at + {apart}" if apart else f"{place.name}_at"

    def launch(self, made: known.Known, given: list[str]) -> str:
        self._gpu, grid = made.gpu, (*made.grid, 1, 1)[:3]
        if not known.takes_stream(made.kernel):
            return f"{self.constant(made.kernel[grid])}({', '.join(given)})"
        self.constant(made.kernel)  # which unloads its code when nobody holds it
        run, function = self.constant(made.kernel.run), self.constant(made.kernel.function)
        packed = self.constant(made.kernel.packed_metadata)
        head = (*map(str, grid), "stream", function, packed, "None", "None", "None")
        return f"{run}({', '.join((*head, *given))})"

    def plan(self, count: int, body: list[str], last: str) -> Plan:
        arguments = ", ".join(f"t{i}" for i in range(count))
        itself = f"return function({arguments})"
        lines = [f"if disturbed(): {itself}"]
        lines += [f"{name}_at = {name}.data_ptr()" for name in self._given]
        if self._given:
            addresses = " | ".join(f"{name}_at" for name in self._given)
            lines.append(f"if ({addresses}) & 15: {itself}")
        if self._gpu is not None:
            self._names.update(
                current_device=torch.cuda.current_device,
                device=torch.cuda.device,
                stream_of=known.stream_of(),
            )
            lines.append(f"if current_device() != {self._gpu}:")
            lines.append(f"    with device({self._gpu}): return plan({arguments})")
            lines.append(f"stream = stream_of({self._gpu})")
        for line in body:
            lines.append(line)
            name = line.partition(" = ")[0]
            if name in self._made:
                lines.append(f"{name}_at = {name}.data_ptr()")
        source = "\n    ".join([f"def plan({arguments}):", *lines, last])
        exec(compile(source, "<plan>", "exec"), self._names)
        return Plan(self._names["plan"], source)


def _tensors_of(step: _Called | known.Known | None) -> list[torch.Tensor]:
    """The tensors that a step takes; one that only takes memory reads none."""
    if step is None or (isinstance(step, _Called) and step.empty):
        return []
    given = (*step.args, *step.kwargs.values()) if isinstance(step, _Called) else step.arguments
    return [one for one in given if isinstance(one, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _same_form(one: torch.Tensor, other: torch.Tensor) -> bool:
    place = one.storage_offset() == other.storage_offset() and one.dtype is other.dtype
    return place and one.shape == other.shape and one.stride() == other.stride()


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether `torch.empty_like` of one makes a tensor of the other's form."""
    same = one.stride() == other.stride() and one.device == other.device
    return same and one.is_contiguous() and one.shape == other.shape and one.dtype is other.dtype


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(isinstance(one, torch.Tensor) for one in value)
