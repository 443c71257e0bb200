"""What lies between a forward pass and its backward pass: other calls, changed tensors, saved
tensors that were moved; and what is left when both are over."""

import gc
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.compare import near
from tinyllama.harness.check.crash import refuses
from tinyllama.harness.check.evaluate import Inputs, is_gradient
from tinyllama.harness.check.finding import Candidate, Problem, Rank, leaves
from tinyllama.harness.check.graph import Graph, same_bits
from tinyllama.harness.declare.autograd import several
from tinyllama.harness.machine.modes import DispatchMode

Gradients = Mapping[str, torch.Tensor]
IN_FLIGHT = 9  # calls between a forward pass and its backward pass: other layers of a model
COUNTED = 3  # calls in a row, between which tensors are counted
ALIKE = 1e-3  # of the norm of a result
POINTS = 6  # within a call at which another thread makes a call
PATIENCE = 5.0  # seconds that it may take, before it is taken to wait for a lock
MOVED = ("contiguous", "transposed")  # layouts of inputs whose saved tensors are moved


def differing(one: Gradients, other: Gradients) -> Iterator[str]:
    for name, gradient in one.items():
        if name not in other or not same_bits(gradient, other[name]):
            yield name


def unlike(one: Gradients, other: Gradients) -> Iterator[str]:
    """Those that differ by more than rounding: in another thread, BLAS may add up in another order
    (seen once for a product of 10 x 32 x 48)."""
    for name in differing(one, other):
        if name not in other or not near(other[name], one[name], ALIKE):
            yield name


def behind_a_change(candidate: Candidate, case: OpCase, first: Gradients) -> Problem:
    """What is wrong where outputs, or inputs, were changed in place before the backward pass: it is
    to give the same gradients, or autograd is to refuse it."""
    for kind in ("an output", "an input"):
        graph = Graph(candidate, candidate.inputs(case))
        outputs = kind == "an output"
        try:
            with torch.no_grad():
                for value in graph.outputs.values() if outputs else leaves(graph.args):
                    if value.is_floating_point():
                        value.mul_(2)
                    elif not outputs and value.dim():
                        value.copy_(value.flip(0))  # each a value that may stand there
            found = graph.gradients()
        except RuntimeError:  # a tensor saved for the backward pass was changed, says autograd
            continue
        if wrong := list(differing(first, found)):
            text = f"{kind} that is changed in place changes gradients, and autograd does not know"
            return case, f"{text}: {', '.join(wrong)}", Rank.UNSAFE
    return None


def behind_a_gradient(candidate: Candidate, case: OpCase, first: Gradients) -> Problem:
    """What is wrong where a gradient was changed in place by the one who got it: as clipping does,
    and adding up gradients. It must not be what a later backward pass reads."""
    graph = Graph(candidate, candidate.inputs(case))
    given = graph.gradients(copy=False)
    graph.gradients(lambda upstream: upstream * 2)
    if wrong := list(differing(first, given)):
        text = "a backward pass with another upstream gradient changes gradients of the one before"
        return case, f"{text}: {', '.join(wrong)}"
    if wrong := _behind_changed(graph, given, first):

        def alone(name: str) -> bool:
            graph = Graph(candidate, candidate.inputs(case))
            return bool(_behind_changed(graph, {name: graph.gradients(copy=False)[name]}, first))

        name = next(filter(alone, given), " and ".join(given))
        text = f"grad {name} shares memory with what a later backward pass reads"
        return case, f"{text}: it changes {', '.join(wrong)}", Rank.UNSAFE
    return None


def _behind_changed(graph: Graph, given: Gradients, first: Gradients) -> list[str]:
    """The gradients that differ from the first ones once these are changed in place."""
    for value in given.values():
        pairs = zip(value.shape, value.stride(), strict=True)
        if all(stride or size < 2 for size, stride in pairs):
            value.detach().mul_(2)
    return list(differing(first, graph.gradients()))


def accumulated(candidate: Candidate, case: OpCase, first: Gradients) -> Problem:
    """What is wrong in ``.grad`` of leaves after ``backward()``: it is the gradient after one pass,
    and twice that after another one, and each input has its own memory there."""
    inputs, names = candidate.inputs(case), candidate.op.differentiable
    graph = Graph(candidate, inputs)
    graph.gradients()
    if left := [name for name in names if graph.args[name].grad is not None]:
        text = "torch.autograd.grad, which leaves .grad alone, has written to that of"
        return case, f"{text} {', '.join(left)}"
    for times in (1, 2):
        graph.backward()
        found = {name: graph.args[name].grad for name in names}
        wrong = [
            name
            for name, one in found.items()
            if one is None or not same_bits(one, first[name] * times)
        ]
        # Threads, and atomics, may add up in another order.
        alike = [
            name
            for name in wrong
            if found[name] is not None and near(found[name], first[name] * times, ALIKE / times)
        ]
        if wrong := [name for name in wrong if name not in alike]:
            text = "the gradient" if times == 1 else "the sum of both passes' gradients"
            after = "backward()" if times == 1 else "a second backward(), which adds to it"
            return case, f"after {after}, .grad is not {text}: {', '.join(wrong)}"
    own = _sharing(candidate, inputs)
    if own and not _sharing(replace(candidate, provider=candidate.op["eager"]), inputs):
        text = "after backward(), .grad of different inputs share memory: a change of that of"
        return case, f"{text} {own[0]} changes that of {own[1]}"
    return None


def _sharing(candidate: Candidate, inputs: Inputs) -> tuple[str, str] | None:
    """Two inputs, of which a change of the ``.grad`` of one changes that of the other."""
    graph = Graph(candidate, inputs)
    graph.backward()
    found = {name: graph.args[name].grad for name in candidate.op.differentiable}
    for name, value in found.items():
        before = {n: one.clone() for n, one in found.items() if n != name}
        value.mul_(2).add_(1)
        for other, one in before.items():
            if not same_bits(one, found[other]):
                return name, other
    return None


def with_a_gradient(candidate: Candidate, case: OpCase, first: Gradients) -> Problem:
    """What is wrong where outputs are changed in place by operations that autograd sees, as by a
    residual that is added: gradients are to follow, or autograd is to refuse it."""

    def tried(one: Candidate) -> Gradients:
        graph = Graph(one, one.inputs(case))
        for name in graph.upstream:
            graph.outputs[name].mul_(2)
        return graph.gradients()

    try:
        tried(replace(candidate, provider=candidate.op["eager"]))
    except RuntimeError:
        return None
    try:
        found = tried(candidate)
    except RuntimeError:  # saved for the backward pass, or a view that a function has made
        return None
    wrong = [n for n, one in found.items() if not near(one, 2 * first[n], 0.5)]
    if wrong:
        text = "gradients do not follow an output that is multiplied in place"
        return case, f"{text}: {', '.join(wrong)}"
    return None


def in_threads(candidate: Candidate, case: OpCase) -> Problem:
    """What is wrong where another thread makes a call in the midst of one, as several threads or
    streams do: memory for intermediate results that is kept must not be shared. A call may wait for
    a lock."""
    first, second = (candidate.inputs(case, draw) for draw in (0, 1))
    usual, between = _named(candidate, first), _Between()
    with between:
        _named(candidate, first)
    points = {between.calls * number // POINTS for number in range(POINTS)}
    between = _Between(lambda: _named(candidate, second), points)
    with between:
        found = _named(candidate, first)
    for thread in between.threads:
        thread.join()
    for name in unlike(usual, found):
        text = "a call in another thread, in the midst of the first one, changes its"
        return case, f"{text} {name}: they share memory for intermediate results", Rank.UNSAFE
    return None


def _named(candidate: Candidate, inputs: Inputs) -> dict[str, torch.Tensor]:
    if candidate.op.differentiable:
        return _results(Graph(candidate, inputs))
    return {name: one.clone() for name, one in Graph(candidate, inputs).outputs.items()}


def launching() -> bool:
    """Whether a kernel is interpreted just now, which no other thread may interrupt."""
    module = sys.modules.get("tinyllama.harness.kernels.interpreter_values")
    return module is not None and bool(module.RUNNING)


class _Between(DispatchMode):
    """Counts calls of torch outside of launches, and calls a function in a thread before some."""

    def __init__(
        self, other: Callable[[], Any] | None = None, points: Collection[int] = ()
    ) -> None:
        super().__init__()
        self.other, self.points, self.calls = other, points, 0
        self.threads: list[threading.Thread] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not launching():
            if self.calls in self.points and self.other is not None:
                self.threads.append(threading.Thread(target=self.other, daemon=True))
                self.threads[-1].start()
                self.threads[-1].join(PATIENCE)
            self.calls += 1
        return func(*args, **(kwargs or {}))


def moved(candidate: Candidate, case: OpCase) -> Problem:
    """What is wrong where saved tensors come back as dense copies in other memory, as those of
    `torch.autograd.graph.save_on_cpu` and of checkpoints do."""

    def pack(value: torch.Tensor) -> torch.Tensor:
        dense = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        return dense.copy_(value)

    for layout in MOVED:
        one = replace(case, layout=layout)
        inputs = candidate.inputs(one)
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, torch.clone)
        try:
            usual = _results(Graph(candidate, inputs))
        except Exception as error:
            if layout == "contiguous" or not refuses(error):
                raise
            continue  # `input layouts` is about that
        found = _results(Graph(candidate, inputs, within=hooks))
        if all(same_bits(value, usual[name]) for name, value in found.items()):
            continue
        known = {w.name for w in candidate.wrong(one, usual, inputs)}
        wrong = [w for w in candidate.wrong(one, found, inputs) if is_gradient(w.name)]
        wrong = [w for w in wrong if w.name not in known]
        if wrong:
            text = "saved tensors that come back as dense copies, as of save_on_cpu"
            return one, f"{text}: {wrong[0]}"
    return None


def _results(graph: Graph) -> dict[str, torch.Tensor]:
    found = {**graph.outputs, **{f"grad {n}": g for n, g in graph.gradients().items()}}
    return {name: value.detach() for name, value in found.items()}


def kept_alive(candidate: Candidate, case: OpCase) -> Problem:
    """Whether memory of a call is still there when all that was made of it is gone and others
    followed; or is there until Python looks for cycles, which is advice."""
    reference = _alive(replace(candidate, provider=candidate.op["eager"]), case)
    found = _alive(candidate, case)
    for collected, what, rank in (
        (True, f"is not released by {IN_FLIGHT - 1} other calls", Rank.UNSAFE),
        (False, "is released only when Python collects cycles: save it for backward", Rank.WARNING),
    ):
        own = [name for name in found[collected] if name not in reference[collected]]
        if own:
            return case, f"memory of {', '.join(own)} {what}", rank
    before = _tensors()
    for draw in range(COUNTED):
        graph = Graph(candidate, candidate.inputs(case, draw))
        if candidate.op.differentiable:
            graph.gradients()
    del graph
    if (more := (_tensors() - before) // COUNTED) > 0:
        text = f"each call leaves {more} more tensors than the one before: something keeps them"
        return case, text, Rank.UNSAFE
    return None


def _tensors() -> int:
    """How many there are in this process."""
    gc.collect()
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())


def _alive(candidate: Candidate, case: OpCase) -> dict[bool, list[str]]:
    """The inputs, outputs and gradients of a first call whose memory is there after others; whether
    cycles were collected."""

    def called(draw: int) -> dict[str, Any]:
        inputs = candidate.inputs(case, draw)
        graph = Graph(candidate, inputs)
        gradients = graph.gradients(copy=False) if candidate.op.differentiable else {}
        named = {**graph.args, **graph.outputs}
        named |= {f"grad {name}": value for name, value in gradients.items()}
        return {
            name: StorageWeakRef(one.untyped_storage())
            for name, value in named.items()
            for one in several(tuple(value) if isinstance(value, list) else value)
        }

    on = gc.isenabled()
    gc.disable()
    try:
        first = called(0)
        for draw in range(1, IN_FLIGHT):
            called(draw)
        before = [name for name, one in first.items() if not one.expired()]
        gc.collect()
        after = [name for name, one in first.items() if not one.expired()]
    finally:
        if on:
            gc.enable()
    return {False: before, True: after}
