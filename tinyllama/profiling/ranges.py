"""To which op and layer the work of a training step belongs, as PyTorch's profiler sees it.

In a step that runs eagerly each op is called inside a range named after it (`named`). What is
launched inside belongs to it, and so does the backward pass of what autograd recorded inside: both
have one sequence number (`attributed`). A captured step has no ranges, and launches the same
kernels in the same order (`by_order`).
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import record_function

from tinyllama.training.step import TrainStep
from tinyllama.training.wrapped_ops import wrapped_ops

PREFIX = "op: "
UNKNOWN = "not mapped"
STEP = "step"  # what a step does beside its ops: it loads the batch, and checks the loss
# Ops that torch.compile fused run outside every range, in operators that have one of these words in
# their name.
COMPILED = "compiled graph"
OUTSIDE = ("compiledfunction", "torch-compiled")
# The kernels of this op are recognised by their own names: some are launched during the backward
# pass of other ops, and some by no operator, so that the profiler names no parent.
OPTIMIZER = "adamw"


@dataclass(frozen=True)
class Work:
    """A kernel on a GPU, or an operator's own time on a CPU, and the op that it belongs to."""

    name: str
    seconds: float
    op: str
    backward: bool = False


def within(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def ranged(*args: Any, **params: Any) -> Any:
        with record_function(PREFIX + name):
            return call(*args, **params)

    return ranged


@contextlib.contextmanager
def named(step: TrainStep) -> Iterator[None]:
    """Call each op of a step inside a range: ``layers.0.attention``, ``final_norm``, ``adamw``."""
    update = step.optimizer.step
    step.optimizer.step = within(OPTIMIZER, update)  # type: ignore[method-assign]
    try:
        with wrapped_ops(step.model, within):
            yield
    finally:
        step.optimizer.step = update  # type: ignore[method-assign]


def attributed(events: Sequence[Any], gpu: bool) -> list[Work]:
    """The work of profiled events (`torch.autograd.profiler_util.FunctionEvent`), in order."""
    on_host = [event for event in events if event.device_type == DeviceType.CPU]
    forward_op = {
        event.sequence_nr: op
        for event in on_host
        if event.sequence_nr >= 0 and not _is_backward(event)
        if (op := _range_of(event)) is not None
    }
    work = []
    for event in on_host:
        if event.name.startswith(PREFIX):
            continue
        op, backward = _range_of(event), False
        if op in (None, STEP) and (source := _backward_of(event)) is not None:
            op, backward = forward_op.get(source, op), True
        if op in (None, STEP) and _is_compiled(event):
            op = COMPILED
        if gpu:
            times = [(kernel.name, kernel.duration) for kernel in event.kernels]
        else:
            times = [(event.name, event.self_cpu_time_total)]
        for name, microseconds in times:
            if gpu or microseconds:
                work.append(_work(name, microseconds * 1e-6, op or UNKNOWN, backward))
    return work


def _work(name: str, seconds: float, op: str, backward: bool = False) -> Work:
    """The work of a kernel that was launched as part of an op; the optimizer's by its name."""
    if name.startswith(f"{OPTIMIZER}_"):
        return Work(name, seconds, OPTIMIZER)
    return Work(name, seconds, op, backward)


def _is_backward(event: Any) -> bool:
    return event.scope == 1 or event.name.startswith("autograd::engine::evaluate_function")


def _parents(event: Any) -> Iterator[Any]:
    while event is not None:
        yield event
        event = event.cpu_parent


def _is_compiled(event: Any) -> bool:
    names = [parent.name.lower() for parent in _parents(event)]
    return any(part in name for part in OUTSIDE for name in names)


def _range_of(event: Any) -> str | None:
    """The innermost range that an event is in."""
    names = (parent.name for parent in _parents(event) if parent.name.startswith(PREFIX))
    innermost = next(names, None)
    return None if innermost is None else str(innermost.removeprefix(PREFIX))


def _backward_of(event: Any) -> int | None:
    """The sequence number of the operator whose backward pass an event belongs to."""
    numbers = (p.sequence_nr for p in _parents(event) if _is_backward(p) and p.sequence_nr >= 0)
    return next(numbers, None)


def in_layers(work: Sequence[Work], op: str, layers: int) -> list[Work]:
    """The kernels of an op that computes all layers, each with its layer. It follows from the
    order: kernels of one name are launched equally often in each layer, forward from the first
    layer on, backward from the last. What cannot be divided so keeps the op without a layer."""
    places: dict[tuple[str, bool], list[int]] = {}
    for place, kernel in enumerate(work):
        if kernel.op == op:
            places.setdefault((kernel.name, kernel.backward), []).append(place)
    result = list(work)
    for (_, backward), alike in places.items():
        if len(alike) % layers == 0:
            for nth, place in enumerate(alike):
                layer = nth // (len(alike) // layers)
                layer = layers - 1 - layer if backward else layer
                result[place] = replace(work[place], op=f"layers.{layer}.{op}")
    return result


def by_order(eager: Sequence[Work], captured: Iterable[tuple[str, float]]) -> list[Work]:
    """The work of a captured step, from names and seconds in the order of their start.

    A kernel belongs to the op of the next eager kernel of the same name. One that the eager step
    launched less often is not mapped.
    """
    left: dict[str, list[Work]] = {}
    for kernel in reversed(eager):
        left.setdefault(kernel.name, []).append(kernel)
    result = []
    for name, seconds in captured:
        same = left.get(name)
        source = same.pop() if same else _work(name, 0.0, UNKNOWN)
        result.append(Work(name, seconds, source.op, source.backward))
    return result
