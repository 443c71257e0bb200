"""A page and its plots as lines of text, of SYNTHETIC records that reach each case.

    python -m correctness_tests.support.told_page    (writes correctness_tests/report/page.txt anew)

`test_page_as_a_whole.py` compares with that file, so whatever a page says differently is seen in
a difference of two texts. It holds all that the page's own code decides, and nothing that depends
on the version of matplotlib: of a plot the axes, with every line, mark and word in data units.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.lines import Line2D

from correctness_tests.support.sample_records import (
    DATES,
    FIRST,
    SECOND,
    VERSIONS,
    ops,
    ratio,
    record,
    sample_targets,
    step,
    steps,
    sweep,
    target,
)
from tinyllama.harness.page import plots, roofline, svg, view
from tinyllama.harness.page.charts import Chart
from tinyllama.harness.page.panels import Panel
from tinyllama.harness.page.svg import Key, Plot
from tinyllama.harness.page.tables import Cell, Table
from tinyllama.harness.records import history
from tinyllama.harness.records.entries import CeilingEntry, OpEntry, SweepEntry
from tinyllama.harness.records.results import Record
from tinyllama.harness.records.targets import OpTarget

FILE = Path(__file__).parents[1] / "report/page.txt"
CERTIFICATE: dict[str, Any] = {
    "schema": 1,
    "device": FIRST,
    "date": "2026-03-01T10:00:00Z",
    "commits": ["0123456789abcdef", "fedcba9876543210"],
    "versions": VERSIONS,
    "blocks": 240,
    "merges": 12000,
    "bars": [
        {"text": "SYNTHETIC false alarms below 1%", "held": True, "measured": "0.3%"},
        {"text": "SYNTHETIC 2% slower is found", "held": False, "measured": "97%"},
    ],
    "found": [
        {
            "benchmark": "step/small-bf16/v3",
            "metric": "seconds",
            "spread": 0.0123,
            "detected": {"0.01": 0.5, "0.02": 0.991},
            "smallest": 0.018,
        },
        {
            "benchmark": "step/small-bf16/v1",
            "metric": "seconds",
            "spread": 0.2,
            "detected": {"0.01": 0.02, "0.02": 0.04},
            "smallest": None,
        },
    ],
}


# -- the records -------------------------------------------------------------------------------


def records() -> list[Record]:
    """What comes last of each list matters: a list that is cut short shows."""
    older = {**VERSIONS, "torch": "2.10.0"}
    found = []
    for date, scale in zip(DATES, (1.3, 0.7, 1.0), strict=True):
        share = ratio(0.62 / 0.97 / scale) if scale != 1 else ratio(0.6)
        contenders = ("floor", "v1", "v3", "hf-eager", *(("v2",) if date == DATES[-1] else ()))
        entries = [step("small-bf16", name, scale) for name in contenders]
        entries = [replace(e, floor_share=share) if e.who == "v3" else e for e in entries]
        entries += steps("small-bf16")[-1:]  # which cannot run
        found.append(record("small-bf16", entries, date=date, versions=older))
    found[0].entries.append(step("small-bf16", "v1", name="old", unavailable={"watts": "is old"}))
    found[-1].versions = VERSIONS
    for hour in ("09", "15"):
        few = [
            step("small-fp32", "v2", 3.1, seconds_quartiles=None, rounds=None),
            step("small-fp32", "floor", 3.1),
            step("small-fp32", "v1", 3.1, time_by=None, gradients=73, unavailable={"mfu": hour}),
        ]
        found.append(record("small-fp32", few, date=f"2026-03-02T{hour}:30:00Z"))
    beside = {"products": 2e-3, "an unknown kind": 1e-3}
    alone = [
        step("medium-bf16", "v3", time_by=beside, busy_seconds=None, last_loss=None),
        step("medium-bf16", "torchtitan", time_by={"products": 1.5 * 2.2e-3}),
    ]
    found.append(record("medium-bf16", alone, command="pytest perf_tests/steps"))
    first = step("large-bf16", "v1", 9.0, time_by=None, busy_seconds=None, floor_share=None)
    found.append(record("large-bf16", [first, step("large-bf16", "liger", 99.0)]))
    found.append(record("ops-bf16", _ops()))
    found.append(record("sweep-small-bf16", _sweep()))
    part = steps("small-tf32")[:3]
    found.append(record("small-tf32", part, date="2026-03-03T09:00:00Z", complete=False))
    machine = {"clocks_mhz": {"sm": 1000, "memory_max": 3000}, "cores": 4}
    found.append(record("ops-fp16", _few_ops(), device=SECOND, machine=machine))
    return found


def _ops() -> list[Any]:
    """The ceilings; two ops, one of them in two cases; one without a count of operations, and one
    that cannot run. The last of the forward pass is the nearest to the roofline, the last of the
    other the farthest."""
    found = [e for e in ops() if isinstance(e, OpEntry) and e.who != "torch"]
    large = [e for e in found if e.op == "rope" and ("B=8," in e.case or e.who == "triton")]
    large += [e for e in found if e.op == "swiglu" and "B=8," in e.case and e.who != "eager"]
    qkv = [e for e in found if e.op == "qkv" and (e.who, e.passes) == ("triton", "forward")]
    kept: list[Any] = [e for e in ops() if isinstance(e, CeilingEntry)]
    kept += [replace(e, flops=None, bytes=None, layouts=None) for e in qkv]
    near = sorted(large, key=lambda e: (e.role == "ours", e.roofline_share or 0))
    kept += [e for e in near if e.passes == "forward"]
    kept += [e for e in reversed(near) if e.passes != "forward"]
    last = next(e for e in found if e.op == "adamw")
    return [*kept, replace(last, cannot="SYNTHETIC: no such kernel", seconds=None)]


def _few_ops() -> list[Any]:
    """Eager is the best here, one kernel cannot run, and the only peer is the last."""
    product, copy = reversed([e for e in ops("fp16") if isinstance(e, CeilingEntry)])
    rope = {e.who: e for e in ops("fp16") if isinstance(e, OpEntry) and e.op == "rope"}
    eager = replace(rope["eager"], roofline_share=0.95)
    again = replace(
        eager, name="op/again", case="B=9", roofline_share=0.5
    )  # which moves as many bytes
    cannot = replace(rope["triton"], cannot="SYNTHETIC: no such kernel", seconds=None)
    peer = replace(rope["liger"], provider="liger, SYNTHETIC")
    return [product, copy, eager, again, rope["torch"], cannot, peer]


def _sweep() -> list[SweepEntry]:
    """Lengths and batches of two tiers and a peer. The longest does not fit in one of the tiers,
    the largest batch was only tried by the peer, which ends at the shortest length but one."""
    lengths, batches = (128, 256, 4096, 8192), (1, 4)
    found = []
    for entry in sweep("small-bf16"):
        if entry.role == "tier" and entry.who != "v2":
            size = entry.seq_len if entry.axis == "seq_len" else entry.batch_size
            found += [entry] if size in (lengths if entry.axis == "seq_len" else batches) else []
    peer = {(e.batch_size, e.seq_len): e for e in sweep("small-bf16") if e.role == "peer"}
    return [*found, peer[8, 256], peer[1, 256], peer[64, 256]]


def targets() -> list[Any]:
    bar = OpTarget(
        metric="bandwidth_share",
        at_least=0.5,
        device=FIRST,
        source="SYNTHETIC",
        provider="triton",
        op=("rope",),
        case=(),
        dtype=("bf16",),
        passes="forward",
        caveat="SYNTHETIC caveat",
    )
    over = replace(bar, metric="speed", over=("torch", "liger"), caveat="")
    most = {"at_least": None, "at_most": 9.0}
    kernels = replace(bar, metric="kernels", provider="eager", passes="forward+backward", **most)
    metrics = ("live_bytes", "held_bytes", "held_peak_bytes", "joules_per_sample", "mfu", "copies")
    bars = [target(metric, None, at_most=1.5) for metric in (*metrics, "gradient_share")]
    return [bar, over, kernels, *bars, *sample_targets()]


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
    for text in axes.texts:
        at = (*text.xy, *text.get_position())  # type: ignore[attr-defined]
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
