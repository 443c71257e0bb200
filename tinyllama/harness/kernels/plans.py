"""Plans: what a function of tensors allocates and launches, found once and repeated for less.

A launch needs a configuration, a grid, strides and a compiled kernel, all of which follow from the
layouts of the tensors. `planned` runs a function, sees its allocations, kernels and calls of torch,
and writes a Python function that repeats these alone:

    results, plan = planned(function, (x, weight))
    print(plan.source)
    plan.function()(x2, weight2)     # the results for other tensors of the same layout

It is for functions whose steps depend on nothing but the layouts of their tensors (shapes, strides,
dtypes, the device) and on what `tinyllama.harness.declare.checked.signature` names. Whoever calls a
plan sees to that. The plan calls the function instead

- where a tensor does not begin at a multiple of 16 bytes: kernels are specialised by that;
- where another device than that of the tensors is the current one;
- where someone watches or changes launches (`tinyllama.harness.kernels.launch_cache.disturbed`).

`Repeated` uses a plan only if two calls gave the same one, so that a number that Python counts or
draws is found out. There is no plan (`Plan.reason` says why) of a function that reads a value back
from the device, writes to an input by torch, copies an input to another layout, uses another device
or a tensor that is neither given nor made, has arguments that share memory, or returns what no step
fills.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tinyllama.harness.kernels import descriptors, launch_cache, layout
from tinyllama.harness.kernels.layout import memory_of
from tinyllama.harness.kernels.precision import autocast_kind
from tinyllama.harness.machine.modes import DispatchMode

_SAME_MEMORY = {torch.ops.aten.detach.default, torch.ops.aten._unsafe_view.default}
# Functions of torch that are called in less time than the operators that they call.
DIRECT: dict[Any, Any] = {
    torch.ops.aten.mm.default: torch.mm,
    torch.ops.aten.mm.out: torch.mm,
    torch.ops.aten.addmm_.default: torch.Tensor.addmm_,
    torch.ops.aten.zero_.default: torch.Tensor.zero_,
}
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


@dataclass(frozen=True)
class Plan:
    """The steps of a function as the source of another one, and the objects that it names. reason:
    why there is none."""

    source: str = ""
    names: dict[str, Any] = field(default_factory=dict)
    reason: str = ""

    def function(self) -> Callable[..., Any]:
        """The function of the source."""
        names = dict(self.names)
        exec(compile(self.source, "<plan>", "exec"), names)
        function: Callable[..., Any] = names["plan"]
        return function


def planned(
    function: Callable[..., Sequence[torch.Tensor | None]], tensors: Sequence[torch.Tensor | None]
) -> tuple[Sequence[torch.Tensor | None], Plan]:
    """The results of ``function(*tensors)``, and its plan. One tensor at least is not None."""
    watch, before = _Watch(function, tensors), layout.copies
    with launch_cache.traced(watch.launched), watch:
        results = function(*tensors)
    if layout.copies != before:
        watch.refuse("an input is copied to another layout")
    return results, watch.plan(results)


class Repeated:
    """A function of tensors of one layout: call `run`. On a GPU its second and its third call are
    watched, since many layouts are seen once; if they give the same plan, it is what later calls
    run. Elsewhere, and unless ``replays``, the function is called as it is.
    """

    def __init__(self, function: Callable[..., Any], replays: bool = True) -> None:
        self._function, self._met = function, False
        self._first: Plan | None = None
        self.run: Callable[..., Any] = self._watched if replays else function

    def _watched(self, *tensors: torch.Tensor | None) -> Any:
        if not self._met or launch_cache.disturbed():
            self._met = True
            return self._function(*tensors)
        index = next((tensor.get_device() for tensor in tensors if tensor is not None), -1)
        if index < 0 or not launch_cache.knows(index):
            self.run = self._function
            return self._function(*tensors)
        results, plan = planned(self._function, tensors)
        if plan.reason or (self._first is not None and self._first != plan):
            self.run = self._function
        elif self._first is not None:
            self.run = plan.function()
        self._first = plan
        return results


class _Watch(DispatchMode):
    """Writes down the calls of torch and, by `launched`, of kernels, in their order."""

    def __init__(
        self, function: Callable[..., Any], tensors: Sequence[torch.Tensor | None]
    ) -> None:
        super().__init__()
        self._reason = ""
        self._lines: list[str] = []
        self._names = {
            "function": function,
            "disturbed": launch_cache.disturbed,
            "current_device": torch.cuda.current_device,
            "stream_of": launch_cache.stream_of(),
            "empty": torch.empty_strided,
            "described": descriptors.at,
            "below_autocast": torch._C._DisableAutocast,
            "no_view": torch.ops.aten._unsafe_view.default,
            "inf": math.inf,
            "nan": math.nan,
        }
        self._filled: set[str] = set()
        self._free: dict[str, int] = {}  # lines that allocate what has been asked for by no form
        self._views: dict[tuple[Any, ...], str] = {}  # names, by the memory's and the form
        # By memory: the first tensor that has it, and its name. Held, or others would get it next.
        self._first: dict[int, tuple[str, torch.Tensor]] = {}
        self._arguments = [f"t{i}" for i in range(len(tensors))]
        for name, tensor in zip(self._arguments, tensors, strict=True):
            if tensor is not None:
                self._know(name, tensor)
        first = next(iter(self._first.values()))[1]
        self._device, self._gpu = first.device, first.get_device()
        self._autocast = torch.is_autocast_enabled(autocast_kind(first))
        self._inputs = [name for name, _ in self._first.values()]
        self._addressed = {*self._inputs}  # whose addresses the plan has asked for

    def refuse(self, reason: str) -> None:
        """There is no plan, and why; the first reason counts."""
        self._reason = self._reason or reason

    def _know(self, name: str, tensor: torch.Tensor) -> None:
        if memory_of(tensor) in self._first:
            self.refuse("tensors share memory")
        if tensor.data_ptr() % 16:
            self.refuse(f"{name} does not begin at a multiple of 16 bytes")
        self._first[memory_of(tensor)] = name, tensor

    # -- what is seen ---------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not isinstance(result, torch.Tensor):
            of_tensors = any(isinstance(x, torch.Tensor) for x in (*args, *kwargs.values()))
            parts = func.is_view and all(memory_of(part) in self._first for part in result)
            if of_tensors and not parts:  # else it is of types alone, or gives views
                self.refuse(f"{func} gives no tensor")
        elif func._schema.is_mutable:
            self._written(func, args, kwargs, result)
        elif memory_of(result) not in self._first:
            self._allocated(func, args, kwargs, result)
        elif not func.is_view and func not in _SAME_MEMORY:
            self.refuse(f"{func} gives the memory of {self._first[memory_of(result)][0]}")
        return result

    def _allocated(self, func: Any, args: Any, kwargs: Any, result: torch.Tensor) -> None:
        name = f"a{len(self._first)}"
        if result.device != self._device:
            self.refuse(f"{func} makes a tensor on {result.device}")
        if func._schema.name.removeprefix("aten::") in _EMPTY:
            self._free[name] = len(self._lines)
            self._lines.append(self._allocation(name, result))
        else:
            self._called(func, args, kwargs, f"{name} = ")
            self._filled.add(name)
        self._know(name, result)

    def _allocation(self, name: str, like: torch.Tensor) -> str:
        form = tuple(like.shape), like.stride(), like.dtype, like.device
        return "{} = empty({}, {}, dtype={}, device={})".format(name, *map(self._constant, form))

    def _written(self, func: Any, args: Any, kwargs: Any, result: torch.Tensor) -> None:
        """A call that fills what it returns."""
        name, _ = self._of(result)
        mutated = [x for x in func._schema.arguments if x.alias_info and x.alias_info.is_write]
        if name in self._inputs or len(mutated) != 1 or torch.Tag.inplace_view in func.tags:
            self.refuse(f"{func} writes to an input, to several tensors, or to a tensor's layout")
        self._called(func, args, kwargs)
        self._filled.add(name)

    def _called(self, func: Any, args: Any, kwargs: Any, result: str = "") -> None:
        values = [self._value(value) for value in args]
        values += [f"{key}={self._value(value)}" for key, value in kwargs.items()]
        below = "with below_autocast(): " if self._autocast else ""  # as it was called here
        self._lines.append(
            f"{below}{result}{self._constant(DIRECT.get(func, func))}({', '.join(values)})"
        )

    def launched(self, launch: launch_cache.CachedLaunch | None) -> None:
        """A kernel was launched; None: one that is not known by its signature."""
        if launch is None:
            self.refuse("a kernel that Triton specialises at every launch")
            return
        (x, y, z), kernel = (*launch.grid, 1, 1)[:3], launch.kernel
        name = self._constant(kernel)  # which unloads its code when nobody refers to it
        arguments = ", ".join(map(self._address, launch.arguments))
        if launch_cache.takes_stream(kernel):
            run, *head = map(self._constant, (kernel.run, kernel.function, kernel.packed_metadata))
            head = [f"{x}, {y}, {z}, stream", *head, "None, None, None"]
            self._lines.append(f"{run}({', '.join(head)}, {arguments})")
        else:
            self._lines.append(f"{name}[{x}, {y}, {z}]({arguments})")

    # -- how it is written ----------------------------------------------------------------------

    def _constant(self, value: Any) -> str:
        if value is None or type(value) in (bool, int, float):
            return repr(value)
        name = f"c{len(self._names)}"
        self._names[name] = value
        return name

    def _of(self, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        """The name of a tensor's memory, and the tensor that has it."""
        if memory_of(tensor) not in self._first:
            self.refuse("a tensor that is neither given nor made")
        return self._first.get(memory_of(tensor), ("", tensor))

    def _address(self, value: Any) -> str:
        """An argument of a launch."""
        if descriptors.is_descriptor(type(value)):
            form = self._constant(descriptors.without_tensor(value))
            return f"described({form}, {self._address(value.base)})"
        if not isinstance(value, torch.Tensor):
            return self._constant(value)
        name, first = self._of(value)
        self._filled.add(name)
        if name not in self._addressed:
            self._addressed.add(name)
            self._lines.append(f"{name}_at = {name}.data_ptr()")
        offset = value.data_ptr() - first.data_ptr()
        return f"{name}_at + {offset}" if offset else f"{name}_at"

    def _value(self, value: Any) -> str:
        """An argument of a call of torch."""
        if isinstance(value, (list, tuple)) and any(isinstance(x, torch.Tensor) for x in value):
            self.refuse("a list of tensors in a call of torch")
        if not isinstance(value, torch.Tensor):
            return self._constant(value)
        return self._viewed(*self._of(value), value)

    def _viewed(self, name: str, first: torch.Tensor, value: torch.Tensor) -> str:
        """A tensor in the memory of another, which has a name."""
        if value.dtype is not first.dtype or value.is_conj() or value.is_neg():
            self.refuse(f"{name} in another dtype, or as its conjugate")
        line = self._free.pop(name, None)
        dense = value.is_contiguous() and first.is_contiguous() and value.numel() == first.numel()
        if line is not None and dense:  # allocated as it is first asked for
            self._lines[line] = self._allocation(name, value)
            self._first[memory_of(first)] = name, value
            return name
        if _same_form(value, first):
            return name
        offset = value.storage_offset() - first.storage_offset()
        place = name, tuple(value.shape), value.stride(), offset
        if place not in self._views:
            view = self._views[place] = f"v{len(self._views)}"
            size, stride = map(self._constant, place[1:3])
            start = str(value.storage_offset())
            if name in self._inputs:  # which may begin anywhere in its memory
                start = f"{name}.storage_offset() + {offset}"
            self._lines.append(f"{view} = {name}.as_strided({size}, {stride}, {start})")
        return self._views[place]

    def _result(self, result: torch.Tensor | None) -> str:
        if result is None:
            return "None"
        name, first = self._of(result)
        if name in self._inputs:
            self.refuse(f"{name} is a result")
        if result.numel() and name not in self._filled:
            self.refuse(f"no step that is seen fills {name}")
        view = self._viewed(name, first, result)
        if view == name or result._is_view():
            return view
        # As `_unsafe_view` gives it: an autograd function's view may not be changed in place.
        return f"no_view({view}, {self._constant(tuple(result.shape))})"

    def plan(self, results: Sequence[torch.Tensor | None]) -> Plan:
        """What was seen, if it can be repeated. results: of the function."""
        returned = ", ".join(map(self._result, results))
        if self._reason:
            return Plan(reason=self._reason)
        itself = f"return function({', '.join(self._arguments)})"
        lines = [
            f"def plan({', '.join(self._arguments)}):",
            f"if disturbed() or current_device() != {self._gpu}: {itself}",
            *(f"{name}_at = {name}.data_ptr()" for name in self._inputs),
            f"if ({' | '.join(f'{name}_at' for name in self._inputs)}) & 15: {itself}",
            f"stream = stream_of({self._gpu})",
            *_freed(self._lines, returned),
            f"return ({returned},)",
        ]
        return Plan("\n    ".join(lines), self._names)


_MADE = re.compile(r"\b[av]\d+(?=\b|_at\b)")


def _freed(lines: list[str], returned: str) -> list[str]:
    """The steps, with tensors deleted after the last step that needs them, unless returned."""
    last = {name: i for i, line in enumerate(lines) for name in _MADE.findall(line)}
    for name in _MADE.findall(returned):
        last.pop(name, None)
    after: dict[int, list[str]] = {}
    for name, i in last.items():
        after.setdefault(i, []).append(name)
    return [
        line if i not in after else f"{line}; del {', '.join(after[i])}"
        for i, line in enumerate(lines)
    ]


def _same_form(a: torch.Tensor, b: torch.Tensor) -> bool:
    place = a.storage_offset() == b.storage_offset() and a.dtype is b.dtype
    return place and a.shape == b.shape and a.stride() == b.stride()
