"""Device graphs without a device: what is captured is recorded call by call, and replayed.

A replay runs no Python of the step. It makes the recorded calls again, on the same memory and with
the same Python values, as a device graph does: what changes between steps shows only if it is in
memory that a call reads.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tinyllama.harness.machine import device as device_file
from tinyllama.training import plans
from tinyllama.training import step as step_file
from tinyllama.training.step import TrainStep

_ON_HOST = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default}


class RecordedGraph:
    """The calls of a capture, in order; `replay` makes them again."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []

    def replay(self) -> None:
        with torch.no_grad():
            for call in self.calls:
                call()


class _Recording(TorchDispatchMode):
    """Records the operators of torch; in place or not, each writes where it wrote before."""

    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self.graph = graph
        self.paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if self.paused:
            return func(*args, **given)
        if func in _ON_HOST:
            raise RuntimeError(f"{func} waits for the device, which a capture does not allow")
        results = func(*args, **given)
        made = [t for t in tree_leaves(results) if isinstance(t, torch.Tensor)]
        inputs = [t for t in tree_leaves((args, given)) if isinstance(t, torch.Tensor)]
        theirs = {t.untyped_storage().data_ptr() for t in inputs}
        new = [t for t in made if t.untyped_storage().data_ptr() not in theirs]

        def again() -> None:
            found = func(*args, **given)
            if new:
                for old, tensor in zip(made, tree_leaves(found), strict=True):
                    old.copy_(tensor)

        if new or func._schema.is_mutable:
            self.graph.calls.append(again)
        return results


def recording(graph: RecordedGraph) -> AbstractContextManager[object]:
    """What runs inside is recorded in a graph."""
    return _Recording(graph)


def record_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a CPU capture: steps are recorded and replayed, those of interpreted kernels included."""
    current: list[_Recording] = []

    def capture(*graphs: Sequence[Callable[[], object]]) -> list[RecordedGraph]:
        captured = []
        for functions in graphs:
            graph = RecordedGraph()
            with _Recording(graph) as recording:
                current.append(recording)
                for function in functions:
                    function()
                current.clear()
            captured.append(graph)
        return captured

    def cannot(capability: str, device: torch.device) -> str | None:
        return None if capability == "capture" else device_file.cannot(capability, device)

    prepare = TrainStep.prepare

    def prepared(self: TrainStep, **options: Any) -> None:
        with self.preserved():  # a device records a step without running it
            prepare(self, **options)

    monkeypatch.setattr(TrainStep, "prepare", prepared)
    monkeypatch.setattr(step_file, "capture_graphs", capture)
    monkeypatch.setattr(plans, "cannot", cannot)
    _record_interpreted(monkeypatch, current)


def _record_interpreted(monkeypatch: pytest.MonkeyPatch, current: list[_Recording]) -> None:
    """A launch of an interpreted kernel is one call, with the tensors and values of its launch."""
    from tinyllama.harness.kernels import interpreter

    run = interpreter.run

    def recorded(*args: Any) -> None:
        if not current:
            run(*args)
            return
        recording = current[0]
        recording.graph.calls.append(lambda: run(*args))
        recording.paused = True
        try:
            run(*args)
        finally:
            recording.paused = False

    monkeypatch.setattr(interpreter, "run", recorded)
