"""The roofline: what each op reaches, under what the device allows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from tinyllama.harness.page.plots import marker, name_axes
from tinyllama.harness.page.svg import STYLE, Key, Plot, colour, frame, to_svg
from tinyllama.harness.records.numbers import tick


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

    A letter stands above each op.
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
    """The letter of each op above the highest of its marks."""
    highest: dict[tuple[str, float], float] = {}
    for mark in marks:
        op = mark.letter, mark.x
        highest[op] = max(mark.y, highest.get(op, 0.0))
    for (letter, x), y in highest.items():
        axes.annotate(
            letter,
            (x, y),
            (0, 7),
            textcoords="offset points",
            ha="center",
            weight="bold",
            color=colour("fg"),
            annotation_clip=False,
        )


def _ticks(axes: Axes) -> None:
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(base=10, numticks=7))
        axis.set_major_formatter(FuncFormatter(lambda value, _: tick(float(f"{value:.3g}"))))
        axis.set_minor_formatter(NullFormatter())
        axis.set_minor_locator(LogLocator(base=10, subs=(1.0,), numticks=40))
    name_axes(axes, "FLOP / byte", "FLOP / s")
