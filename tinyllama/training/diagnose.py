"""Diagnosis of a step: which parameters receive a gradient, and the output of every op.

Both run the forward and the backward pass of a batch once more, uncaptured and without an update
(`TrainStep.probe`), so diagnosis does not change the loss curve of a run.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tinyllama.model.llama import TinyLlama
from tinyllama.ops import OPS
from tinyllama.training.shards import in_shards, local
from tinyllama.training.step import TrainStep
from tinyllama.training.wrapped_ops import Call, wrapped_ops

RECEIVED = "received"
_DECIDES = ("not finite", RECEIVED, "all zero")  # of several ranks, the first


@dataclass(frozen=True)
class Statistics:
    """Of one tensor: minimum, maximum and standard deviation of the finite values (None where
    there are none), and the share of values that are not finite, from 0 to 1."""

    minimum: float | None
    maximum: float | None
    std: float | None
    nonfinite: float

    @classmethod
    def of(cls, tensor: torch.Tensor, scale: float = 1.0) -> "Statistics":
        """The statistics of ``tensor / scale``."""
        values = tensor.detach().double().flatten() / scale
        finite = values[values.isfinite()]
        nonfinite = 1.0 - finite.numel() / values.numel()
        if not finite.numel():
            return cls(None, None, None, nonfinite)
        low, high = finite.aminmax()
        return cls(low.item(), high.item(), finite.std(correction=0).item(), nonfinite)


@dataclass
class Observed:
    """One output of one application of an op, such as ``layers.3.attention``.

    gradient: of the unscaled loss with respect to it; None where none arrived.
    """

    name: str
    output: Statistics
    gradient: Statistics | None = None


@dataclass(frozen=True)
class Diagnosis:
    """Every op of the step with this number (from 1), in the order of computation.

    With several micro-batches, this is the first one with an output that is not finite, else the
    first one with a gradient that is not finite, else the first one.
    loss: of the step; None when it is not finite.
    """

    step: int
    loss: float | None
    ops: tuple[Observed, ...]

    @property
    def first_nonfinite(self) -> Observed | None:
        """The first op whose output is not finite."""
        return next((op for op in self.ops if op.output.nonfinite), None)

    @property
    def last_nonfinite_gradient(self) -> Observed | None:
        """The op where the backward pass first met a gradient that is not finite."""
        sick = (op for op in reversed(self.ops) if op.gradient and op.gradient.nonfinite)
        return next(sick, None)


def diagnose(
    step: TrainStep, tokens_BT: torch.Tensor, targets_BT: torch.Tensor, number: int
) -> Diagnosis:
    """Statistics of every op of one step, run uncompiled and uncaptured, without an update."""
    with observed(step.model, step.scaler.get_scale()) as ops:
        loss = step.probe(tokens_BT, targets_BT, compiled=False).item()
    value = loss if math.isfinite(loss) else None
    size = len(ops) // step.config.accumulate
    diagnoses = [
        Diagnosis(number, value, tuple(ops[i : i + size])) for i in range(0, len(ops), size)
    ]
    for sick in ("first_nonfinite", "last_nonfinite_gradient"):
        for diagnosis in diagnoses:
            if getattr(diagnosis, sick):
                return diagnosis
    return diagnoses[0]


@contextlib.contextmanager
def observed(model: TinyLlama, scale: float = 1.0) -> Iterator[list[Observed]]:
    """Collect the outputs of the model's ops in this context; gradients are divided by ``scale``.

    The outputs are those of the embedding, each op of each layer (``layers.0.qkv.q`` where an op
    has several outputs), each whole layer, the final norm, the logits and the loss. The logits
    are computed only for the diagnosis, since a loss op need not store them; so they have no
    gradient.
    """
    entries: list[Observed] = []

    def note(name: str, tensor: torch.Tensor) -> None:
        entry = Observed(name, Statistics.of(tensor))
        entries.append(entry)

        def note_gradient(gradient: torch.Tensor | None) -> None:
            if gradient is not None:
                entry.gradient = Statistics.of(gradient, scale)

        if tensor.requires_grad:
            tensor.register_hook(note_gradient)

    def wrap(name: str, call: Call) -> Call:
        declared = OPS.get(name.rpartition(".")[2])
        outputs = declared.outputs if declared else ()
        name = name.removesuffix(".block")  # a whole layer

        def noted(*inputs: Any, **params: Any) -> Any:
            results = call(*inputs, **params)
            if name == "loss":
                with torch.no_grad():
                    note("logits", F.linear(*inputs[:2]))
            if isinstance(results, torch.Tensor):
                note(name, results)
            else:
                for output, result in zip(outputs, results, strict=True):
                    note(f"{name}.{output}", result)
            return results

        return noted

    with wrapped_ops(model, wrap):
        yield entries


def _on_gradient(parameter: torch.nn.Parameter, hook: Callable[[Any], None]) -> Any:
    """Call the hook with each gradient of a parameter, or of this rank's shard of it, to which
    autograd itself brings none."""
    if not in_shards(parameter):
        return parameter.register_hook(hook)
    return parameter.register_post_accumulate_grad_hook(lambda p: hook(local(p.grad)))


def gradients(step: TrainStep, tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> dict[str, str]:
    """What arrived at each parameter: `RECEIVED`, or ``absent``, ``all zero``, ``not finite``.

    A hook sees each gradient when it arrives: an earlier ``grad`` does not count, and a gradient
    that is freed at once does. One micro-batch, or one rank, is enough for "received" and for
    "not finite". In fp16 the gradient scaler deliberately starts too high and finds its scale by
    overflows, so here the scale is halved until nothing overflows.
    """
    named = dict(step.model.named_parameters())
    arrived: dict[str, str] = {}

    def watch(name: str) -> Callable[[torch.Tensor | None], None]:
        def hook(gradient: torch.Tensor | None) -> None:
            if gradient is None:
                return
            if not gradient.isfinite().all():
                arrived[name] = "not finite"
            elif gradient.any():
                arrived[name] = "not finite" if arrived.get(name) == "not finite" else RECEIVED
            else:
                arrived.setdefault(name, "all zero")

        return hook

    def probe() -> None:
        arrived.clear()
        step.probe(tokens_BT, targets_BT)
        for theirs in step.ranks.gathered(dict(arrived)):
            for name, what in theirs.items():
                arrived[name] = min(what, arrived.get(name, what), key=_DECIDES.index)

    hooks = [_on_gradient(parameter, watch(name)) for name, parameter in named.items()]
    scaler = step.scaler.state_dict()
    try:
        probe()
        while "not finite" in arrived.values() and step.scaler.get_scale() > 1:
            step.scaler.update(step.scaler.get_scale() / 2)
            probe()
    finally:
        for handle in hooks:
            handle.remove()
        if scaler:
            step.scaler.load_state_dict(scaler)
    return {name: arrived.get(name, "absent") for name in named}
