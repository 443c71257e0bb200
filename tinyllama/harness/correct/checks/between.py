"""What lies between a forward pass and its backward pass: other calls, changed tensors, saved
tensors that were moved; and what is left when both are over."""

import gc
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tinyllama.harness.correct.cases import OpCase
from tinyllama.harness.correct.checks.crash import refuses
from tinyllama.harness.correct.checks.finding import Candidate, Problem, Rank, leaves
from tinyllama.harness.correct.checks.graph import Graph, same_bits
from tinyllama.harness.correct.evaluate import is_gradient
from tinyllama.harness.declare.autograd import several

Gradients = Mapping[str, torch.Tensor]
IN_FLIGHT = 9  # calls between a forward pass and its backward pass: other layers of a model
MOVED = ("contiguous", "transposed")  # layouts of inputs whose saved tensors are moved


def differing(one: Gradients, other: Gradients) -> Iterator[str]:
    for name, gradient in one.items():
        if name not in other or not same_bits(gradient, other[name]):
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
    for name, value in given.items():
        pairs = zip(value.shape, value.stride(), strict=True)
        if all(stride or size < 2 for size, stride in pairs):
            value.detach().mul_(2)
            if wrong := list(differing(first, graph.gradients())):
                text = f"grad {name} shares memory with what a later backward pass reads"
                return case, f"{text}: it changes {', '.join(wrong)}", Rank.UNSAFE
    return None


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
        (True, "is never released, in whatever many calls", Rank.UNSAFE),
        (False, "is released only when Python collects cycles: save it for backward", Rank.ADVICE),
    ):
        own = [name for name in found[collected] if name not in reference[collected]]
        if own:
            return case, f"memory of {', '.join(own)} {what}", rank
    return None


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

    gc.collect()
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
