"""Plots of lines. Lengths of layout are in points."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

from tinyllama.harness.page.svg import STYLE, Key, Plot, colour, frame, to_svg
from tinyllama.harness.records.numbers import tick


@dataclass(frozen=True)
class Line:
    """A series. points: (x, y); hollow: indices of points that are marked as different."""

    key: Key
    points: tuple[tuple[float, float], ...]
    dashed: bool = False
    hollow: frozenset[int] = field(default_factory=frozenset)


@rc_context(STYLE)
def lines(
    series: Sequence[Line],
    x_label: str,
    y_label: str,
    ident: str,
    label: str,
    x_names: Sequence[str] = (),
    marks: Sequence[float] = (),
) -> Plot:
    """Lines over a logarithmic y; x logarithmic, or with ``x_names`` the places 0, 1, 2...

    marks: x at which a vertical line is drawn.
    """
    axes = frame(230, left=46, bottom=38, right=16, top=24)
    axes.set_yscale("log")
    xs = sorted({x for line in series for x, _ in line.points})
    if x_names:
        margin = max(0.25, 0.06 * (len(x_names) - 1))
        axes.set_xlim(-margin, len(x_names) - 1 + margin)
        _x_ticks(axes, list(range(len(x_names))), x_names, width=78)
    else:
        axes.set_xscale("log")
        axes.set_xlim(xs[0] / 1.15, xs[-1] * 1.15)
        _x_ticks(axes, xs, [tick(x) for x in xs], width=34)
    for mark in marks:
        axes.axvline(mark, color=colour("muted"), linewidth=1.2, linestyle=(0, (2, 2)))
    tips = {}
    for index, line in enumerate(series):
        _line(axes, line, f"line{index}")
        tips[f"line{index}"] = line.key.label
    _y_ticks(axes)
    name_axes(axes, x_label, y_label)
    return Plot(to_svg(axes, ident, label, tips), label, tuple(line.key for line in series))


def _line(axes: Axes, line: Line, gid: str) -> None:
    xs, ys = zip(*line.points, strict=True)
    paint = colour(line.key.colour)
    style = (0, (4, 2)) if line.dashed else "-"
    axes.plot(xs, ys, color=paint, linestyle=style, linewidth=1.6, gid=gid)
    for index, (x, y) in enumerate(line.points):
        marker(axes, x, y, line.key, hollow=index in line.hollow)


def marker(axes: Axes, x: float, y: float, key: Key, hollow: bool = False, gid: str = "") -> None:
    """A point in the colour and shape of a key."""
    paint = colour(key.colour)
    axes.plot(
        x,
        y,
        marker=key.shape,
        markersize=7.5,
        markeredgewidth=1.5,
        color=paint,
        markerfacecolor=colour("card") if hollow or key.hollow else paint,
        linestyle="none",
        gid=gid or None,
    )


def name_axes(axes: Axes, x: str, y: str) -> None:
    """Write what is on the axes: x below, y in the corner above."""
    axes.set_xlabel(x, color=colour("muted"), labelpad=3)
    axes.annotate(y, (0, 1), (2, -12), "figure fraction", "offset points", color=colour("muted"))


def _x_ticks(axes: Axes, places: Sequence[float], names: Sequence[str], width: float) -> None:
    """Names at as many places as have room for one, ``width`` points wide; the last always."""
    at = axes.transData.transform([(place, 1.0) for place in places])[:, 0]
    chosen: list[int] = []
    for index in reversed(range(len(places))):
        if not chosen or at[chosen[-1]] - at[index] >= width:
            chosen.append(index)
    axes.set_xticks([places[index] for index in chosen], [names[index] for index in chosen])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_minor_locator(FixedLocator(list(places)))


def _y_ticks(axes: Axes) -> None:
    """1, 2, 5 in each decade, or the decades alone when there are many; a decade at the least."""
    low, high = axes.get_ylim()
    if high / low < 10:
        middle = (low * high) ** 0.5
        low, high = middle / 10**0.5, middle * 10**0.5
    axes.set_ylim(low, high)
    subs = (1.0, 2.0, 5.0) if high / low < 300 else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=subs, numticks=20))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(float(f"{value:.3g}"))))
    axes.yaxis.set_minor_formatter(NullFormatter())
