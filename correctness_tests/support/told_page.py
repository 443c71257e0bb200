"""A page and its plots as lines of text, of SYNTHETIC records that reach each case.

    python -m correctness_tests.support.told_page    (writes correctness_tests/report/page.txt anew)

`test_page_as_a_whole.py` compares with that file, so whatever a page says differently is seen in
a difference of two texts. It holds all that the page's own code decides, and nothing that depends
on the version of matplotlib: of a plot the axes, with every line, mark and word in data units.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.lines import Line2D

from correctness_tests.support.irregular_records import CERTIFICATE, records, targets
from tinyllama.harness.page import plots, roofline, svg, view
from tinyllama.harness.page.charts import Chart
from tinyllama.harness.page.panels import Panel
from tinyllama.harness.page.svg import Key, Plot
from tinyllama.harness.page.tables import Cell, Table
from tinyllama.harness.records import history

FILE = Path(__file__).parents[1] / "report/page.txt"
# -- as text -----------------------------------------------------------------------------------


def told() -> str:
    """The page and its plots."""
    with (
        mock.patch.object(plots, "to_svg", _drawn),
        mock.patch.object(roofline, "to_svg", _drawn),
        mock.patch.object(history, "unsearched", return_value="SYNTHETIC: not searched"),
    ):
        page = view.page(records(), targets(), "SYNTHETIC page", [CERTIFICATE])
    lines = [page.title]
    for device in page.devices:
        lines += [f"device {device.ident}: {device.name}; {device.told}"]
        lines += [f"  {name}: {value}" for name, value in device.facts]
        lines += [f"  left out: {line}" for line in device.left_out]
        lines += _table(device.sources) if device.sources else []
        for section in device.sections:
            lines += ["", f"section {section.ident}: {section.title}", f"  {section.intro}"]
            lines += [f"  empty: {section.empty}"] if not section.panels else []
            for panel in section.panels:
                lines += _panel(panel)
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _panel(panel: Panel) -> Iterator[str]:
    yield f"panel {panel.title} / {panel.summary} / {panel.source}"
    yield from (f"  square {' '.join(square)}" for square in panel.strip)
    yield from (f"  note {note}" for note in panel.notes)
    for figure in panel.figures:
        yield f"  figure {figure.caption}"
        yield from (f"    {line}" for line in _plot(figure.plot))
    for table in (*panel.tables, *panel.aside):
        yield from (f"  {line}" for line in _table(table))


def _plot(plot: Plot | Chart) -> Iterator[str]:
    yield f"label {plot.label}"
    yield from (f"key {_key(key)}" for key in plot.keys)
    if isinstance(plot, Plot):
        yield from plot.svg.splitlines()
        return
    yield f"unit {plot.unit}; ticks {' '.join(f'{text}@{at:.3f}' for at, text in plot.ticks)}"
    for bar in plot.rows:
        yield f"bar {bar.name} / {bar.figures} / {_key(bar.key)}"
        yield from (f"  dot {d.at:.3f} {_key(d.key)} {d.tip}{' aside' * d.aside}" for d in bar.dots)
        yield from (f"  part {p.width:.3f} {p.colour} {p.tip}" for p in bar.parts)


def _key(key: Key | None) -> str:
    return f"{key.label} {key.colour} {key.shape}{' hollow' * key.hollow}" if key else "-"


def _table(table: Table) -> Iterator[str]:
    yield f"table {table.caption}{' (folded)' * table.folded}"
    headers = (
        f"{h.name} [{h.unit}] {h.meaning}{' words' * h.words}".replace("  ", " ").replace("[] ", "")
        for h in table.headers
    )
    yield f"  columns {'; '.join(headers)}"
    for row in table.rows:
        strong = " strong" * row.strong
        cells = " | ".join(map(_cell, row.cells))
        yield f"  row {cells}{strong} {row.reason} {row.ident and '#' + row.ident}".rstrip()


def _cell(cell: Cell) -> str:
    found = cell.text
    found += f" ({cell.note})" if cell.note else ""
    found += f" {cell.share:.3f}" if cell.share is not None else ""
    found += f" <{cell.key.label}>" if cell.key else ""
    found += f" -> {cell.href}" if cell.href else ""
    return found + "".join(f" [{a:.2f} {b:.2f} {c:.2f}]" for a, b, c in cell.boxes)


def _drawn(axes: Axes, ident: str, label: str, tips: Mapping[str, str]) -> str:
    """What is in some axes, in the place of the drawing."""
    figure = axes.figure
    size = [72 * float(each) for each in figure.get_size_inches()]  # type: ignore[union-attr]
    box = axes.get_position()
    ends = (box.x0 * size[0], box.x1 * size[0], box.y0 * size[1], box.y1 * size[1])
    lines = [f"drawing {ident} of {label[:30]}: {_numbers(size)}, axes {_numbers(ends)}"]
    for name, axis, limits in (
        ("x", axes.xaxis, axes.get_xlim()),
        ("y", axes.yaxis, axes.get_ylim()),
    ):
        places = [float(place) for place in axis.get_majorticklocs()]
        inside = [place for place in places if limits[0] <= place <= limits[1]]
        names = axis.get_major_formatter().format_ticks(inside)
        lines.append(
            f"{name} {axis.get_scale()} {_numbers(limits)} {axis.get_label().get_text()}: "
            + " ".join(f"{text}@{place:.4g}" for text, place in zip(names, inside, strict=True))
        )
        minor = [float(place) for place in axis.get_minorticklocs()]
        lines.append(f"  between {_numbers([p for p in minor if limits[0] <= p <= limits[1]])}")
    looks: dict[tuple[str, str], list[str]] = {}  # with the tip; marks that look alike are one line
    for line in axes.lines:
        tip = tips.get(line.get_gid() or "", "")
        points = " ".join(f"({_numbers(point)})" for point in line.get_xydata())  # type: ignore[arg-type, union-attr]
        looks.setdefault((_look(line), tip), []).append(points)
    lines += [f"{look} {tip}: {' '.join(points)}" for (look, tip), points in looks.items()]
    words: list[Any] = list(axes.texts)
    for text in words:
        at = (*text.xy, *text.get_position())
        look = [_colour(text.get_color()), text.get_ha(), str(text.get_weight())]
        lines.append(f"word {text.get_text()} {_numbers(at)} {' '.join(look)}")
    return "\n".join(lines)


def _look(line: Line2D) -> str:
    found = [_colour(line.get_color()), str(line.get_linestyle()), f"{line.get_linewidth():g}"]
    if str(line.get_marker()) not in ("None", ""):
        face = _colour(line.get_markerfacecolor())
        sizes = f"{line.get_markersize():g} {line.get_markeredgewidth():g}"
        found = ["marks", found[0], str(line.get_marker()), sizes, face]
    return " ".join([*found, *([] if line.get_clip_on() else ["beyond the axes"])])


def _colour(colour: Any) -> str:
    names = {svg.colour(name): name for name in svg.NAMES}
    return names.get(to_hex(colour), str(colour))


def _numbers(values: Sequence[Any]) -> str:
    return " ".join(f"{float(value):.4g}" for value in values)


if __name__ == "__main__":
    FILE.write_text(told(), encoding="utf-8")
