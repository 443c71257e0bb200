"""Bytes of a training step by category, over its course."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tinyllama.harness.measure.memory import Allocations
from tinyllama.training.step import TrainStep

CATEGORIES = ("parameters", "optimizer states", "gradients", "activations")
MOST_POINTS = 1000  # of the curve; of a longer one the peaks of its parts stay


class _Course(Allocations):
    """Bytes after every operator: of all tensors made in the step, and of gradients among them."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        super().__init__()
        self.parameters = parameters
        self.phase = "forward"
        self.points: list[tuple[str, int, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        phase = self.phase
        if phase == "forward" and torch._C._current_graph_task_id() >= 0:
            phase = "backward"
        self.points.append((phase, self.live, _bytes(p.grad for p in self.parameters)))
        return result


def _bytes(tensors: Iterator[torch.Tensor | None]) -> int:
    """Of the memory behind tensors; views of one buffer count once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors if t is not None}
    return sum(storage.nbytes() for storage in storages.values())


def observe(step: TrainStep, once: Callable[[], None]) -> dict[str, Any]:
    """The bytes of each category at the peak, and the course of gradients and activations.

    Activations are all other tensors that the step makes, temporaries included. What one operator
    allocates and frees inside is not seen, nor what kernels use that allocate by themselves.
    """
    step.optimizer.zero_grad(set_to_none=True)
    fixed = {
        "parameters": _bytes(iter(step.model.parameters())),
        "optimizer states": _bytes(iter(step.optimizer.tensors().values())),
    }
    with _Course(step.optimizer.parameters) as course, _marked(step, course):
        once()
    points = [
        (phase, min(gradients, live), max(0, live - gradients))
        for phase, live, gradients in course.points
    ]
    peak = max(points, key=lambda point: point[1] + point[2])
    at_peak = {**fixed, "gradients": peak[1], "activations": peak[2]}
    return {
        "plan": str(step.plan),
        "peak_bytes": sum(at_peak.values()),
        "peak_phase": peak[0],
        "at_peak_bytes": at_peak,
        "fixed_bytes": fixed,
        "course": _fewer(points),
    }


@contextlib.contextmanager
def _marked(step: TrainStep, course: _Course) -> Iterator[None]:
    """The points from the optimizer's step on are those of the update."""
    update = step.optimizer.step

    def marked(*args: Any, **kwargs: Any) -> Any:
        course.phase = "update"
        return update(*args, **kwargs)

    step.optimizer.step = marked  # type: ignore[method-assign]
    try:
        yield
    finally:
        step.optimizer.step = update  # type: ignore[method-assign]


def _fewer(points: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """At most `MOST_POINTS`: of each stretch the highest."""
    stretch = -(-len(points) // MOST_POINTS)
    parts = (points[start : start + stretch] for start in range(0, len(points), stretch))
    return [max(part, key=lambda point: point[1] + point[2]) for part in parts]


def picture(found: dict[str, Any], path: Path) -> None:
    """Draw the course as an SVG file."""
    from matplotlib.figure import Figure

    course, fixed = found["course"], found["fixed_bytes"]
    places = range(len(course))
    layers = [[fixed[name] / 2**20] * len(course) for name in CATEGORIES[:2]]
    layers += [[point[column] / 2**20 for point in course] for column in (1, 2)]
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    axes.stackplot(places, layers, labels=CATEGORIES, step="post")
    for place in places[1:]:
        if course[place][0] != course[place - 1][0]:
            axes.axvline(place, color="black", linewidth=0.8)
            axes.annotate(
                course[place][0], (place, 1), xycoords=("data", "axes fraction"), va="top"
            )
    axes.set(xlabel="operator", ylabel="MiB", xlim=(0, max(1, len(course) - 1)))
    axes.legend(loc="upper left")
    figure.savefig(path, format="svg")
