"""The roofline: what each op reaches, under what the device allows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from tinyllama.harness.page.plots import marker, name_axes
from tinyllama.harness.page.svg import STYLE, Key, Plot, colour, frame, to_svg
from tinyllama.harness.records.numbers import tick

GAP = 13.0  # points between letters


@dataclass(frozen=True)
class Mark:
    """An op by one provider. x: FLOP/byte; y: FLOP/s; letter: stands for the op."""

    letter: str
    key: Key
    x: float
    y: float
    tip: str


@rc_context(STYLE)
def roofline(
    marks: Sequence[Mark], bandwidth: float | None, peaks: Sequence[float], ident: str, label: str
) -> Plot:
    """Marks on logarithmic axes under the ceilings: bandwidth in byte/s, peaks in FLOP/s.

    A letter above each op, joined to its marks by a thin line; the letters are spread where
    ops of nearly equal intensity would print them over one another.
    """
    axes = frame(300, left=46, bottom=38, right=18, top=36)
    axes.set_xscale("log")
    axes.set_yscale("log")
    xs = [mark.x for mark in marks]
    axes.set_xlim(min(xs) / 2, max(xs) * 2.5)
    roof = [mark.y for mark in marks] + [*peaks]
    roof += [bandwidth * min(xs)] if bandwidth else []
    axes.set_ylim(min(roof) / 2, max(roof) * 1.8)
    _ceilings(axes, bandwidth, peaks)
    _letters(axes, marks)
    tips = {}
    for index, mark in enumerate(marks):
        tips[f"mark{index}"] = mark.tip
        marker(axes, mark.x, mark.y, mark.key, gid=f"mark{index}")
    _ticks(axes)
    keys = dict.fromkeys(mark.key for mark in marks)
    return Plot(to_svg(axes, ident, label, tips), label, tuple(keys))


def _ceilings(axes: Axes, bandwidth: float | None, peaks: Sequence[float]) -> None:
    """The slope of the bandwidth up to the highest peak, and each peak from where it meets it."""
    low, high = axes.get_xlim()
    paint: dict[str, Any] = {"color": colour("ceiling"), "linewidth": 2.0}
    if bandwidth:
        ridge = min(max(peaks) / bandwidth, high) if peaks else high
        axes.plot((low, ridge), (low * bandwidth, ridge * bandwidth), **paint)
    for peak in peaks:
        start = max(low, peak / bandwidth) if bandwidth else low
        if start < high:
            axes.plot((start, high), (peak, peak), **paint)


def _letters(axes: Axes, marks: Sequence[Mark]) -> None:
    """A row of letters above the axes, each over its op."""
    found: dict[tuple[str, float], list[float]] = {}
    for mark in marks:
        found.setdefault((mark.letter, mark.x), []).append(mark.y)
    ordered = sorted(found.items(), key=lambda item: (item[0][1], item[0][0]))
    low, high = axes.get_xlim()
    width = axes.get_window_extent().width * 72 / axes.figure.dpi
    scale = width / math.log(high / low)
    wanted = [math.log(x / low) * scale for (_, x), _ in ordered]
    _, top = axes.get_ylim()
    for place, ((letter, x), ys) in zip(spread(wanted, width), ordered, strict=True):
        at = low * math.exp(place / scale)
        thin: dict[str, Any] = {"color": colour("muted"), "linewidth": 0.6, "clip_on": False}
        axes.plot((at, x, x), (top * 1.02, max(ys), min(ys)), **thin)
        axes.annotate(
            letter,
            (at, top),
            (0, 3),
            textcoords="offset points",
            ha="center",
            weight="bold",
            color=colour("fg"),
            annotation_clip=False,
        )


def spread(wanted: Sequence[float], width: float, gap: float = GAP) -> list[float]:
    """Places for labels near the wanted ones (ascending), ``gap`` apart, within 0 and width.

    They are the nearest in least squares: apart from the gaps, those of an isotonic regression.
    """
    gaps = gap * np.arange(len(wanted))
    places = scipy.optimize.isotonic_regression(np.asarray(wanted) - gaps).x
    return list(np.clip(places, 0.0, max(0.0, width - gaps[-1])) + gaps)


def _ticks(axes: Axes) -> None:
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(base=10, numticks=7))
        axis.set_major_formatter(FuncFormatter(lambda value, _: tick(float(f"{value:.3g}"))))
        axis.set_minor_formatter(NullFormatter())
        axis.set_minor_locator(LogLocator(base=10, subs=(1.0,), numticks=40))
    name_axes(axes, "FLOP / byte", "FLOP / s")
