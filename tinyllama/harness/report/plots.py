"""The plots of the page, as SVG by matplotlib: the ladder of steps, and the roofline of ops."""

import io
from collections.abc import Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from tinyllama.harness.records.entries import CeilingEntry, OpEntry, StepEntry
from tinyllama.harness.records.results import Record
from tinyllama.harness.report.summary import milliseconds
from tinyllama.harness.report.tables import last_passes

STYLE: Any = {"svg.hashsalt": "tinyllama", "svg.fonttype": "none", "font.size": 10}
TIERS = ("#9ecae1", "#6baed6", "#2171b5", "#08306b")  # from the first tier, light, to the last
OP_COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#b8860b",
    "#56b4e9",
    "#7a5cc0",
    "#777777",
)
KINDS = ("fastest peer", "other peers", "floor")  # after the tiers in the legend
PEER, FLOOR = "#d9480f", "#333333"
OP_MARKS = "os^Dv"  # with the colours: one pair for each op


def ladder(records: Sequence[Record]) -> str:
    """A row for each record with steps: the time of each tier and peer over the floor's, or over
    the fastest's where no floor was measured; empty without such a record."""
    rows = [(record, steps) for record in records if (steps := _timed(record))]
    if not rows:
        return ""
    rows.sort(key=lambda row: fastest_of(row[1], "tier"))
    tiers = [_rungs(steps) for _, steps in rows]
    order = list(dict.fromkeys(name for rungs in sorted(tiers, key=len)[::-1] for name in rungs))
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 1.4 + 0.45 * len(rows)), layout="constrained")
        axes = figure.subplots()
        names: dict[str, Any] = {}
        for place, (_, steps) in enumerate(rows):
            _row(axes, -place, steps, order, names)
        axes.axvline(1, color=FLOOR, linewidth=1.5)
        names["floor"] = axes.plot([], [], "|", color=FLOOR, markersize=12, mew=2)[0]
        axes.set_yticks([-n for n in range(len(rows))], [_title(*row) for row in rows])
        axes.set_xscale("log")
        least, most = axes.get_xlim()
        axes.set_xticks([tick for tick in (0.5, 1, 2, 5, 10, 20, 50, 100) if least < tick < most])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_ylim(-len(rows) + 0.4, 0.6)
        axes.set_xlabel("time of a step over the floor's: products, attention, optimizer alone")
        axes.grid(axis="x", alpha=0.3)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        legend = {name: names[name] for name in (*map(str.upper, order), *KINDS) if name in names}
        figure.legend(
            legend.values(),
            legend.keys(),
            loc="outside upper left",
            ncols=len(legend),
            frameon=False,
        )
        return _svg(figure)


def fastest_of(steps: Sequence[StepEntry], role: str) -> float:
    """Seconds of the fastest step of a role; infinite without one."""
    return min((step.time for step in steps if step.role == role), default=float("inf"))


def _timed(record: Record) -> list[StepEntry]:
    return [step for step in record.of(StepEntry) if step.ran]


def _rungs(steps: Sequence[StepEntry]) -> list[str]:
    """The tiers; a way of a tier, such as v3-small, is no rung of the ladder."""
    tiers = [step.who for step in steps if step.role == "tier"]
    return [name for name in tiers if not any(name.startswith(f"{tier}-") for tier in tiers)]


def _row(
    axes: Axes, place: int, steps: Sequence[StepEntry], order: Sequence[str], names: dict[str, Any]
) -> None:
    floor = fastest_of(steps, "floor")
    unit = floor if floor < float("inf") else min(step.time for step in steps)
    peers = sorted((step for step in steps if step.role == "peer"), key=lambda step: step.time)
    for index, peer in enumerate(peers):
        name, face = ("fastest peer", PEER) if index == 0 else ("other peers", "none")
        at = [peer.time / unit]
        marker = axes.plot(at, [place], "D", color=PEER, markerfacecolor=face, markersize=6)[0]
        names.setdefault(name, marker)
    rungs = _rungs(steps)
    for step in (step for step in steps if step.who in rungs):
        colour = TIERS[min(order.index(step.who), len(TIERS) - 1)]
        marker = axes.plot([step.time / unit], [place], "o", color=colour, markersize=9)[0]
        names.setdefault(step.who.upper(), marker)


def _title(record: Record, steps: Sequence[StepEntry]) -> str:
    """The group, and beneath it the time of its fastest tier."""
    tier = min((s for s in steps if s.role == "tier"), key=lambda s: s.time, default=None)
    return record.group + (f"\n{tier.who} {milliseconds(tier)}" if tier else "")


def roofline(record: Record) -> str:
    """The fastest provider of ours and the fastest peer of each case of a record of ops, under the
    ceilings of the same run; empty where no op tells its operations and bytes."""
    cases: dict[tuple[str, ...], list[OpEntry]] = {}
    for entry in last_passes(record):
        if entry.ran and entry.flops and entry.bytes:
            cases.setdefault(entry.call, []).append(entry)
    if not cases:
        return ""
    ops = list(dict.fromkeys(call[0] for call in cases))
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 4.6), layout="constrained")
        axes = figure.subplots()
        for role, filled in (("peer", False), ("ours", True)):
            for (op, *_), entries in cases.items():
                of_role = [entry for entry in entries if entry.role == role]
                if of_role:
                    fastest = min(of_role, key=lambda entry: entry.time)
                    label = op if filled else ""
                    _point(axes, fastest, ops.index(op), label, filled)
        _ceilings(axes, record)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("operations a byte that must be moved")
        axes.set_ylabel("TFLOP/s")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        handles, labels = axes.get_legend_handles_labels()
        legend = dict(zip(labels, handles, strict=True))
        where: Any = "outside right center"
        figure.legend(legend.values(), legend.keys(), loc=where, frameon=False)
        return _svg(figure)


def _point(axes: Axes, entry: OpEntry, index: int, label: str, filled: bool) -> None:
    colour = OP_COLOURS[index % len(OP_COLOURS)]
    assert entry.flops is not None
    assert entry.bytes is not None
    axes.plot(
        [entry.flops / entry.bytes],
        [entry.flops / entry.time / 1e12],
        OP_MARKS[index // len(OP_COLOURS) % len(OP_MARKS)],
        color=colour,
        markerfacecolor=colour if filled else "none",
        label=label or "_",
    )


def _ceilings(axes: Axes, record: Record) -> None:
    """The rate of a copy at each number of operations a byte, as far as that of products."""
    ceilings = {entry.name: entry for entry in record.of(CeilingEntry)}
    copy = ceilings.get("ceiling/copy")
    dtypes = {entry.dtype for entry in record.of(OpEntry)}
    rates = [
        (name.rpartition("-")[2], ceiling.flops_per_second)
        for name, ceiling in ceilings.items()
        if ceiling.flops_per_second and name.rpartition("-")[2] in dtypes
    ]
    if copy is None or not copy.bytes_per_second or not rates:
        return
    low, high = axes.get_xlim()
    low = min(low, 0.1) if low > 0 else 0.1
    for name, rate in rates:
        ridge = rate / copy.bytes_per_second
        points = [low, ridge, max(high, 2 * ridge)]
        heights = [min(rate, x * copy.bytes_per_second) / 1e12 for x in points]
        axes.plot(points, heights, color=FLOOR, linewidth=1.2)
        text = f"{name} product {rate / 1e12:.0f}"
        axes.annotate(text, (points[-1], heights[-1]), ha="right", va="bottom")
    at, rate = 3.0, copy.bytes_per_second / 1e12
    text, offset = f"copy {rate:.2f} TB/s", (-6, 2)
    axes.annotate(text, (at, at * rate), offset, textcoords="offset points", ha="right")


def _svg(figure: Figure) -> str:
    """The figure's SVG element, scaled by the page."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None}, transparent=True)
    text = stream.getvalue()
    return text[text.index("<svg") :]
