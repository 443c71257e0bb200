"""The plots of the page, as SVG by matplotlib: the ladder of steps, and the roofline of ops."""

import io
from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tinyllama.harness.records.entries import CeilingEntry, OpEntry, StepEntry
from tinyllama.harness.records.results import Record
from tinyllama.harness.report.summary import fastest_of, milliseconds
from tinyllama.harness.report.tables import last_passes

STYLE: Any = {"svg.hashsalt": "tinyllama", "svg.fonttype": "none", "font.size": 10}
TIERS = ("#9ecae1", "#6baed6", "#2171b5", "#08306b")  # from the first tier, light, to the last
OPS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7a5cc0", "#777777")
OP_MARKS = "os^Dv"  # with the colours: one pair for each op
FASTEST, OTHERS = "fastest peer", "other peers"
PEER, FLOOR = "#d9480f", "#333333"
TICKS = (0.5, 1, 2, 5, 10, 20, 50, 100)


def ladder(records: Sequence[Record]) -> str:
    """A row for each record with steps: the time of each tier and peer over the floor's, or over
    the fastest's where no floor was measured; empty without such a record."""
    rows = [(record, tier) for record in records if (tier := fastest_of(record, "tier"))]
    if not rows:
        return ""
    rows.sort(key=lambda row: row[1].time)
    points: dict[str, list[tuple[float, int]]] = {}
    for place, (record, tier) in enumerate(rows):
        unit = fastest_of(record, "floor") or tier
        for name, step in _named(record):
            points.setdefault(name, []).append((step.time / unit.time, -place))
    peers = [name for name in (FASTEST, OTHERS) if name in points]
    tiers = sorted(points.keys() - {*peers})
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 1.4 + 0.45 * len(rows)), layout="constrained")
        axes = figure.subplots()
        for name in [*peers[::-1], *tiers]:
            colour = PEER if name in peers else TIERS[min(tiers.index(name), len(TIERS) - 1)]
            look: Any = {"color": colour, "markersize": 6 if name in peers else 9}
            look["markerfacecolor"] = "none" if name == OTHERS else colour
            mark = "D" if name in peers else "o"
            axes.plot(*zip(*points[name], strict=True), mark, label=name, **look)
        axes.axvline(1, color=FLOOR, linewidth=1.5, label="floor")
        labels = [f"{record.group}\n{tier.who} {milliseconds(tier)}" for record, tier in rows]
        axes.set_yticks([-n for n in range(len(rows))], labels)
        axes.set_xscale("log")
        least, most = axes.get_xlim()
        ticks = [tick for tick in TICKS if least < tick < most]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.set_ylim(-len(rows) + 0.4, 0.6)
        axes.set_xlabel("time of a step over the floor's: products, attention, optimizer alone")
        axes.grid(axis="x", alpha=0.3)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        return _svg(figure, "outside upper left", [*tiers, *peers, "floor"])


def _named(record: Record) -> Iterator[tuple[str, StepEntry]]:
    """The steps of a record by their names in the legend. A way of a tier, such as v3-small, is no
    rung of the ladder."""
    fastest = fastest_of(record, "peer")
    tiers = {step.who for step in record.of(StepEntry) if step.role == "tier"}
    for step in record.of(StepEntry):
        if step.ran and step.role == "peer":
            yield FASTEST if step is fastest else OTHERS, step
        elif step.ran and step.role == "tier" and step.who.rpartition("-")[0] not in tiers:
            yield step.who.upper(), step


def roofline(record: Record) -> str:
    """The fastest provider of ours and the fastest peer of each case of a record of ops, under the
    ceilings of the same run; empty where no op tells its operations and bytes."""
    timed = [e for e in last_passes(record) if e.ran and e.flops and e.bytes]
    fastest: dict[tuple[str, ...], OpEntry] = {}
    for entry in sorted(timed, key=lambda entry: entry.time):
        fastest.setdefault((*entry.call, entry.role), entry)
    if not fastest:
        return ""
    ops = list(dict.fromkeys(entry.op for entry in timed))
    points: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for entry in fastest.values():
        flops = entry.flops or 0
        point = flops / (entry.bytes or 1), flops / entry.time / 1e12
        points.setdefault((entry.op, entry.role), []).append(point)
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 4.6), layout="constrained")
        axes = figure.subplots()
        for (op, role), of_op in sorted(points.items(), reverse=True):
            nth, ours = ops.index(op), role == "ours"
            mark, colour = OP_MARKS[nth // len(OPS) % len(OP_MARKS)], OPS[nth % len(OPS)]
            look: Any = {"markerfacecolor": colour if ours else "none"}
            label = op if ours else "_"
            axes.plot(*zip(*of_op, strict=True), mark, color=colour, label=label, **look)
        axes.loglog()
        _ceilings(axes, record)
        axes.set_xlabel("operations a byte that must be moved")
        axes.set_ylabel("TFLOP/s")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        return _svg(figure, "outside right center", ops)


def _ceilings(axes: Axes, record: Record) -> None:
    """The rate of a copy at each number of operations a byte, as far as that of products."""
    ceilings = {entry.name: entry for entry in record.of(CeilingEntry)}
    copy = ceilings.get("ceiling/copy")
    if copy is None or not copy.bytes_per_second:
        return
    low, high = axes.get_xlim()
    for dtype in sorted({entry.dtype for entry in record.of(OpEntry)}):
        product = ceilings.get(f"ceiling/product-{dtype}")
        if product is None or not product.flops_per_second:
            continue
        ridge = product.flops_per_second / copy.bytes_per_second
        spots = [min(low, 0.1), ridge, max(high, 2 * ridge)]
        heights = [min(ridge, spot) * copy.bytes_per_second / 1e12 for spot in spots]
        axes.plot(spots, heights, color=FLOOR, linewidth=1.2)
        text = f"{dtype} product {heights[-1]:.0f}"
        axes.annotate(text, (spots[-1], heights[-1]), ha="right", va="bottom")
    rate = copy.bytes_per_second / 1e12
    text, offset = f"copy {rate:.2f} TB/s", (-6, 2)
    axes.annotate(text, (3.0, 3.0 * rate), offset, textcoords="offset points", ha="right")


def _svg(figure: Figure, place: Any, names: Sequence[str]) -> str:
    """The figure's SVG element with a legend of these names; the page scales it."""
    handles, texts = figure.axes[0].get_legend_handles_labels()
    legend = dict(zip(texts, handles, strict=True))
    labels = [name for name in names if name in legend]
    columns = 1 if "right" in place else len(labels)
    entries = [legend[name] for name in labels]
    figure.legend(entries, labels, loc=place, ncols=columns, frameon=False)
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None}, transparent=True)
    text = stream.getvalue()
    return text[text.index("<svg") :]
