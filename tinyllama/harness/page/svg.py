"""A matplotlib figure as an inline SVG whose colours are those of the page.

Figures are drawn in placeholder colours. In the text of the SVG each is replaced by a CSS custom
property, so that a plot follows the page from light to dark.
"""

import html
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDTH = 312  # points; the width of a plot on a page of 360 CSS pixels
FONT = 11.0
COLOURS = tuple(f"series-{index}" for index in range(8))
NAMES = ("fg", "muted", "grid", "card", "ceiling", *COLOURS)
SHAPES = {
    "o": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "s": "M-3.6-3.6h7.2v7.2h-7.2z",
    "D": "M0-5 5 0 0 5-5 0z",
    "P": "M-1.6-5h3.2v3.4h3.4v3.2h-3.4v3.4h-3.2v-3.4h-3.4v-3.2h3.4z",
    "^": "M0-4.6 4.8 4h-9.6z",
    "v": "M0 4.6 4.8-4h-9.6z",
    "<": "M-4.6 0 4-4.8v9.6z",
    ">": "M4.6 0-4-4.8v9.6z",
    "bar": "M-5-5h10v10h-10z",
}
MARKS = ("o", "s", "D", "P", "^", "v", "<", ">")

# Artists read these when they are made: a plot is drawn and written within this style.
STYLE: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": ["DejaVu Sans"],
    "font.size": FONT,
    "axes.unicode_minus": False,
    "path.simplify": False,
}


@dataclass(frozen=True)
class Key:
    """A line of a legend. colour: a name of the palette in page.css; shape: one of ``SHAPES``."""

    label: str
    colour: str
    shape: str
    hollow: bool = False

    @property
    def path(self) -> str:
        return SHAPES[self.shape]


@dataclass(frozen=True)
class Plot:
    """label: what the plot shows, in words, for readers who cannot see it."""

    svg: str
    label: str
    keys: tuple[Key, ...] = ()


def colour(name: str) -> str:
    """The placeholder of a named colour."""
    return f"#5e{NAMES.index(name):02x}a7"


def frame(height: float, left: float, bottom: float, right: float, top: float) -> Axes:
    """Axes in a figure of the common width; all lengths are in points."""
    figure = Figure(figsize=(WIDTH / 72, height / 72), facecolor="none")
    box = (left / WIDTH, bottom / height)
    size = ((WIDTH - left - right) / WIDTH, (height - bottom - top) / height)
    axes = figure.add_axes((*box, *size), facecolor="none")
    axes.spines[["top", "right"]].set_visible(False)
    for spine in axes.spines.values():
        spine.set_color(colour("grid"))
    axes.tick_params(
        which="both", color=colour("grid"), labelcolor=colour("muted"), labelsize=FONT, pad=3
    )
    axes.grid(color=colour("grid"), linewidth=0.7)
    axes.set_axisbelow(True)
    return axes


def to_svg(axes: Axes, ident: str, label: str, tips: Mapping[str, str]) -> str:
    """The figure of some axes as SVG text.

    ident: makes the ids of this plot unique in a page. tips: gid of an artist -> its tooltip.
    """
    stream = io.StringIO()
    figure = axes.figure
    assert isinstance(figure, Figure)
    with rc_context({"svg.hashsalt": ident}):  # in the ids of what is referred to
        figure.savefig(stream, format="svg", metadata={"Date": None}, facecolor="none")
    text = stream.getvalue()
    for gid, tip in tips.items():
        text = text.replace(f'<g id="{gid}">', f"<g><title>{html.escape(tip)}</title>")
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # the same in every plot, and not referred to
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"<style.*?</style>", "", text, flags=re.S)  # it would apply to the whole page
    text = re.sub(
        r' (?:d|x|y|transform)="[^"]*"',
        lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]),  # to a hundredth of a point
        text.replace("xlink:href", "href"),
    )
    for name in NAMES:
        text = text.replace(colour(name), f"var(--{name})")
    view_box = re.search(r'viewBox="[^"]*"', text)
    assert view_box, "matplotlib gives an SVG its viewBox"
    head = f'<svg {view_box[0]} role="img" aria-label="{html.escape(label)}">'
    head += f"<title>{html.escape(label)}</title>"
    _, _, body = text.partition("<svg")[2].partition(">")
    return re.sub(r"\s*\n\s*", " ", head + body).strip()
