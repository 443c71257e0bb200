"""Plans: what a function of tensors allocates and launches, found once and repeated for less.

A launch needs a configuration, a grid, strides and a compiled kernel, all of which follow from the
layouts of the tensors. `planned` runs a function, sees its allocations, kernels and calls of torch,
and writes a Python function that repeats these alone:

    results, plan = planned(function, (x, weight))
    print(plan.source)
    plan.made()(x2, weight2)     # the results for other tensors of the same layout

It is for functions whose steps depend on nothing but the layouts of their tensors (shapes, strides,
dtypes, the device) and on what `tinyllama.harness.declare.checked.signature` names. Whoever calls a
plan sees to that. The plan calls the function instead

- where a tensor does not begin at a multiple of 16 bytes: kernels are specialised by that;
- where another device than that of the tensors is the current one;
- where someone watches or changes launches (`tinyllama.harness.kernels.known.disturbed`).

`Repeated` uses a plan only if two calls gave the same one, so that a number that Python counts or
draws is found out. There is no plan (`Plan.reason` says why) of a function that reads a value back
from the device, writes by torch, copies an input to another layout, uses another device or a tensor
that is neither given nor made, has arguments that share memory, or returns what no step fills.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tinyllama.harness.kernels import known, layout
from tinyllama.harness.kernels.precision import autocast_kind

_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


@dataclass(frozen=True)
class Plan:
    """The steps of a function as the source of another one, and the objects that it names. reason:
    why there is none."""

    source: str = ""
    names: dict[str, Any] = field(default_factory=dict)
    reason: str = ""

    def made(self) -> Callable[..., Any]:
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
    with known.traced(watch.launched), watch:
        results = function(*tensors)
    if layout.copies != before:
        watch.refuse("an input is copied to another layout")
    return results, watch.plan(results)


class Repeated:
    """A function of tensors of one layout. On a GPU its second and its third call are watched,
    since many layouts are seen once; if they give the same plan, it is put in the function's place.
    Elsewhere the function is called as it is.

    put: puts what is to be called from now on where this object was.
    """

    def __init__(
        self, function: Callable[..., Any], put: Callable[[Callable[..., Any]], None]
    ) -> None:
        self._function, self._put, self._met = function, put, False
        self._seen: Plan | None = None

    def __call__(self, *tensors: torch.Tensor | None) -> Any:
        if not self._met or known.disturbed():
            self._met = True
            return self._function(*tensors)
        index = next((tensor.get_device() for tensor in tensors if tensor is not None), -1)
        if index < 0 or not known.knows(index):
            self._put(self._function)
            return self._function(*tensors)
        results, plan = planned(self._function, tensors)
        if plan.reason or (self._seen is not None and self._seen != plan):
            self._put(self._function)
        elif self._seen is not None:
            self._put(plan.made())
        self._seen = plan
        return results


class _Watch(TorchDispatchMode):
    """Writes down the calls of torch and, by `launched`, of kernels, in their order."""

    def __init__(
        self, function: Callable[..., Any], tensors: Sequence[torch.Tensor | None]
    ) -> None:
        super().__init__()
        self._reason = ""
        self._lines: list[str] = []
        self._names = {
            "function": function,
            "disturbed": known.disturbed,
            "current_device": torch.cuda.current_device,
            "stream_of": known.stream_of(),
            "empty": torch.empty_strided,
            "below_autocast": torch._C._DisableAutocast,
            "inf": math.inf,
            "nan": math.nan,
        }
        self._filled: set[str] = set()
        # By memory: the first tensor that has it, and its name. Held, or others would get it next.
        self._first: dict[int, tuple[str, torch.Tensor]] = {}
        self._arguments = [f"t{i}" for i in range(len(tensors))]
        for name, tensor in zip(self._arguments, tensors, strict=True):
            if tensor is not None:
                self._know(name, tensor)
        first = next(iter(self._first.values()))[1]
        self._device, self._gpu = first.device, first.get_device()
        self._autocast = torch.is_autocast_enabled(autocast_kind(first))
        self._given = [name for name, _ in self._first.values()]

    def refuse(self, reason: str) -> None:
        """There is no plan, and why; the first reason counts."""
        self._reason = self._reason or reason

    def _know(self, name: str, tensor: torch.Tensor) -> None:
        if _memory(tensor) in self._first:
            self.refuse("tensors share memory")
        if tensor.data_ptr() % 16:
            self.refuse(f"{name} does not begin at a multiple of 16 bytes")
        self._first[_memory(tensor)] = name, tensor

    # -- what is seen ---------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not isinstance(result, torch.Tensor):
            if any(isinstance(one, torch.Tensor) for one in (*args, *kwargs.values())):
                self.refuse(f"{func} gives no tensor")  # else it is of types alone
        elif func._schema.is_mutable:
            self.refuse(f"{func} writes")
        elif _memory(result) not in self._first:
            self._made(func, args, kwargs, result)
        elif not func.is_view and func is not torch.ops.aten.detach.default:
            self.refuse(f"{func} gives the memory of {self._first[_memory(result)][0]}")
        return result

    def _made(self, func: Any, args: Any, kwargs: Any, result: torch.Tensor) -> None:
        name = f"a{len(self._first)}"
        if result.device != self._device:
            self.refuse(f"{func} makes a tensor on {result.device}")
        if func._schema.name.removeprefix("aten::") in _EMPTY:
            form = map(self._constant, (tuple(result.shape), result.stride()))
            kind = map(self._constant, (result.dtype, result.device))
            self._lines.append("{} = empty({}, {}, dtype={}, device={})".format(name, *form, *kind))
        else:
            given = [self._whole(one) for one in args]
            given += [f"{key}={self._whole(one)}" for key, one in kwargs.items()]
            below = "with below_autocast(): " if self._autocast else ""  # as it was called here
            self._lines.append(f"{below}{name} = {self._constant(func)}({', '.join(given)})")
            self._filled.add(name)
        self._lines.append(f"{name}_at = {name}.data_ptr()")
        self._know(name, result)

    def launched(self, made: known.Known | None) -> None:
        """A kernel was launched; None: one that is not known by its signature."""
        if made is None:
            self.refuse("a kernel that Triton specialises at every launch")
            return
        (x, y, z), kernel = (*made.grid, 1, 1)[:3], made.kernel
        whole = self._constant(kernel)  # which unloads its code when nobody holds it
        given = ", ".join(map(self._address, made.arguments))
        if known.takes_stream(kernel):
            run, *head = map(self._constant, (kernel.run, kernel.function, kernel.packed_metadata))
            head = [f"{x}, {y}, {z}, stream", *head, "None, None, None"]
            self._lines.append(f"{run}({', '.join(head)}, {given})")
        else:
            self._lines.append(f"{whole}[{x}, {y}, {z}]({given})")

    # -- how it is written ----------------------------------------------------------------------

    def _constant(self, value: Any) -> str:
        if value is None or type(value) in (bool, int, float):
            return repr(value)
        name = f"c{len(self._names)}"
        self._names[name] = value
        return name

    def _of(self, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        """The name of a tensor's memory, and the tensor that has it."""
        if _memory(tensor) not in self._first:
            self.refuse("a tensor that is neither given nor made")
        return self._first.get(_memory(tensor), ("", tensor))

    def _address(self, value: Any) -> str:
        """An argument of a launch."""
        if not isinstance(value, torch.Tensor):
            return self._constant(value)
        name, first = self._of(value)
        self._filled.add(name)
        apart = value.data_ptr() - first.data_ptr()
        return f"{name}_at + {apart}" if apart else f"{name}_at"

    def _whole(self, value: Any) -> str:
        """An argument of a call of torch."""
        if isinstance(value, (list, tuple)) and any(isinstance(x, torch.Tensor) for x in value):
            self.refuse("a list of tensors in a call of torch")
        if not isinstance(value, torch.Tensor):
            return self._constant(value)
        name, first = self._of(value)
        if not _same_form(value, first):
            self.refuse(f"a view of {name} in a call of torch")
        return name

    def _result(self, result: torch.Tensor | None) -> str:
        if result is None:
            return "None"
        name, first = self._of(result)
        if name in self._given:
            self.refuse(f"{name} is a result")
        if result.numel() and name not in self._filled:
            self.refuse(f"no step that is seen fills {name}")
        if result.dtype is not first.dtype:
            self.refuse(f"a result is {name} in another dtype")
        if _same_form(result, first):
            return name
        form = (tuple(result.shape), result.stride(), result.storage_offset())
        return f"{name}.as_strided({', '.join(map(self._constant, form))})"

    def plan(self, results: Sequence[torch.Tensor | None]) -> Plan:
        """What was seen, if it can be repeated. results: of the function."""
        given = ", ".join(map(self._result, results))
        if self._reason:
            return Plan(reason=self._reason)
        itself = f"return function({', '.join(self._arguments)})"
        lines = [
            f"def plan({', '.join(self._arguments)}):",
            f"if disturbed() or current_device() != {self._gpu}: {itself}",
            *(f"{name}_at = {name}.data_ptr()" for name in self._given),
            f"if ({' | '.join(f'{name}_at' for name in self._given)}) & 15: {itself}",
            f"stream = stream_of({self._gpu})",
            *self._lines,
            f"return ({given},)",
        ]
        return Plan("\n    ".join(lines), self._names)


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _same_form(one: torch.Tensor, other: torch.Tensor) -> bool:
    place = one.storage_offset() == other.storage_offset() and one.dtype is other.dtype
    return place and one.shape == other.shape and one.stride() == other.stride()
