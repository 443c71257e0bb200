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

from tinyllama.model.llama import TinyLlama
from tinyllama.ops.block import PARTS, compose
from tinyllama.training.step import TrainStep

PREFIX = "op: "
UNKNOWN = "not mapped"
STACK = "stack"  # all layers as one op
STEP = "step"  # what a step does beside its ops: it loads the batch, and checks the loss
COMPILED = "compiled graph"  # where ops are fused with each other
# What runs outside every range, by a part of the name of the operator that it is in.
OUTSIDE = {"compiledfunction": COMPILED, "torch-compiled": COMPILED}
# Whose kernels are known by their names: they are launched inside the backward pass of other ops,
# or inside no operator, where the profiler does not tell who launches a kernel.
BY_NAME = ("adamw",)


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
    model: TinyLlama = step.model
    layers: list[Any] = list(model.layers)
    table = model.tier.providers()
    norm, loss_of, blocks = model.norm, model.loss_of, [layer.compute for layer in layers]
    stack, rows = model.stack, model.rows
    model.rows = within("embedding", rows)
    model.stack = None if stack is None else within(STACK, stack)
    model.norm = within("final_norm", norm)
    model.loss_of = within("loss", loss_of)
    for index, layer in enumerate(layers):
        block = layer.compute
        if "block" not in table:
            parts = {op: within(f"layers.{index}.{op}", table[op]) for op in PARTS}
            block = compose(parts)
        layer.compute = within(f"layers.{index}.block", block)
    update = step.optimizer.step
    step.optimizer.step = within("adamw", update)  # type: ignore[method-assign]
    try:
        yield
    finally:
        model.norm, model.loss_of, model.stack, model.rows = norm, loss_of, stack, rows
        for layer, block in zip(layers, blocks, strict=True):
            layer.compute = block
        step.optimizer.step = update  # type: ignore[method-assign]


def attributed(events: Sequence[Any], gpu: bool) -> list[Work]:
    """The work of profiled events (`torch.autograd.profiler_util.FunctionEvent`), in order."""
    on_host = [event for event in events if event.device_type == DeviceType.CPU]
    recorded = {
        event.sequence_nr: op
        for event in on_host
        if event.sequence_nr >= 0 and not _is_backward(event)
        if (op := _range_of(event)) is not None
    }
    found = []
    for event in on_host:
        if event.name.startswith(PREFIX):
            continue
        op, backward = _range_of(event), False
        if op in (None, STEP) and (source := _backward_of(event)) is not None:
            op, backward = recorded.get(source, op), True
        if op in (None, STEP):
            op = _outside(event) or op
        if gpu:
            own = [(kernel.name, kernel.duration) for kernel in event.kernels]
        else:
            own = [(event.name, event.self_cpu_time_total)] if event.self_cpu_time_total else []
        found += [
            _work(name, microseconds * 1e-6, op or UNKNOWN, backward) for name, microseconds in own
        ]
    return found


def _work(name: str, seconds: float, op: str, backward: bool = False) -> Work:
    """The work of a kernel that was launched as part of an op, unless its name tells another."""
    own = next((one for one in BY_NAME if name.startswith(f"{one}_")), None)
    return Work(name, seconds, own or op, backward and own is None)


def _is_backward(event: Any) -> bool:
    return event.scope == 1 or event.name.startswith("autograd::engine::evaluate_function")


def _parents(event: Any) -> Iterator[Any]:
    while event is not None:
        yield event
        event = event.cpu_parent


def _outside(event: Any) -> str | None:
    names = [parent.name.lower() for parent in _parents(event)]
    return next((op for part, op in OUTSIDE.items() if any(part in name for name in names)), None)


def _range_of(event: Any) -> str | None:
    """The innermost range that an event is in."""
    for parent in _parents(event):
        if parent.name.startswith(PREFIX):
            return str(parent.name.removeprefix(PREFIX))
    return None


def _backward_of(event: Any) -> int | None:
    """The sequence number of what an event is in the backward pass of."""
    for parent in _parents(event):
        if _is_backward(parent) and parent.sequence_nr >= 0:
            return int(parent.sequence_nr)
    return None


def in_layers(found: Sequence[Work], op: str, layers: int) -> list[Work]:
    """The kernels of an op that computes all layers, each with its layer: those of one name that
    are launched equally often in each, forward from the first layer on, backward from the last."""
    places: dict[tuple[str, bool], list[int]] = {}
    for place, work in enumerate(found):
        if work.op == op:
            places.setdefault((work.name, work.backward), []).append(place)
    shown = list(found)
    for (_, backward), own in places.items():
        if len(own) % layers == 0:
            for nth, place in enumerate(own):
                layer = nth // (len(own) // layers)
                layer = layers - 1 - layer if backward else layer
                shown[place] = replace(found[place], op=f"layers.{layer}.{op}")
    return shown


def by_order(eager: Sequence[Work], captured: Iterable[tuple[str, float]]) -> list[Work]:
    """The work of a captured step, from names and seconds in the order of their start.

    A kernel belongs to the op of the next eager kernel of the same name. One that the eager step
    launched less often is not mapped.
    """
    left: dict[str, list[Work]] = {}
    for work in eager:
        left.setdefault(work.name, []).append(work)
    found = []
    for name, seconds in captured:
        same = left.get(name)
        like = same.pop(0) if same else _work(name, 0.0, UNKNOWN)
        found.append(Work(name, seconds, like.op, like.backward))
    return found
