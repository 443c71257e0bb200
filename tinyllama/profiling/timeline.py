"""A picture of a trace: when kernels ran, stream by stream, coloured by their kind."""

from collections.abc import Sequence
from pathlib import Path

from tinyllama.harness.measure.launches import KINDS, kind_of
from tinyllama.profiling.kernels import Dispatch

COLOURS = dict(zip((*KINDS, "other"), ("C3", "C4", "C1", "C0", "C2", "C7"), strict=True))
FINEST = 1500  # parts of the whole time; what lies closer together is drawn as one

Bars = dict[tuple[int, str], list[tuple[float, float]]]


def bars(dispatches: Sequence[Dispatch]) -> Bars:
    """Start and length in microseconds of what is drawn, by stream and kind, from the first
    kernel's start on."""
    begin = min(one.start_ns for one in dispatches)
    least = (max(one.end_ns for one in dispatches) - begin) * 1e-3 / FINEST
    found: Bars = {}
    for one in sorted(dispatches, key=lambda one: one.start_ns):
        start, end = (one.start_ns - begin) * 1e-3, (one.end_ns - begin) * 1e-3
        own = found.setdefault((one.stream, kind_of(one.name)), [])
        if own and start - sum(own[-1]) < least:
            start, end = own[-1][0], max(end, sum(own[-1]))
            own.pop()
        own.append((start, max(end - start, least)))
    return found


def first_step(dispatches: Sequence[Dispatch], steps: int) -> list[Dispatch]:
    """The launches of the first of some steps, which all launch as many."""
    return sorted(dispatches, key=lambda one: one.start_ns)[: len(dispatches) // steps]


def picture(dispatches: Sequence[Dispatch], path: Path) -> None:
    """Draw the launches of a trace as an SVG file, the same for the same trace."""
    import matplotlib
    from matplotlib.figure import Figure

    found = bars(dispatches)
    streams = sorted({stream for stream, _ in found})
    kinds = [kind for kind in COLOURS if any(kind == own for _, own in found)]
    with matplotlib.rc_context({"svg.hashsalt": "timeline", "svg.fonttype": "none"}):
        figure = Figure(figsize=(10, 0.9 + 0.5 * len(streams)), layout="constrained")
        axes = figure.subplots()
        for kind in kinds:
            for place, stream in enumerate(streams):
                own = found.get((stream, kind), [])
                label = kind if place == 0 else None
                axes.broken_barh(own, (place - 0.4, 0.8), facecolors=COLOURS[kind], label=label)
        names = [f"stream {number}" for number, _ in enumerate(streams, 1)]
        axes.set(xlabel="microseconds", yticks=range(len(streams)), yticklabels=names)
        figure.legend(loc="outside upper center", ncols=len(kinds), frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None})
