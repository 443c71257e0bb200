"""The panel of a sweep: time and peak memory against sequence length and against batch."""

from collections import Counter
from collections.abc import Sequence

from tinyllama.harness.page import captions, columns
from tinyllama.harness.page.panels import Context, Figure, Panel, source
from tinyllama.harness.page.plots import Line, lines
from tinyllama.harness.page.select import Key, entries
from tinyllama.harness.page.tables import Cell, Header, Row, Table, table
from tinyllama.harness.records.entries import SweepEntry
from tinyllama.harness.records.numbers import MEBIBYTE, MISSING, mebibytes, milliseconds
from tinyllama.harness.records.results import Record

OTHER = {"seq_len": "batch_size", "batch_size": "seq_len"}
NAMES = {"seq_len": "sequence length", "batch_size": "batch"}
# field -> what it is, its unit, units in one of the record's
FIELDS = {"seconds": ("time", "ms / step", 1e3), "peak_bytes": ("peak memory", "MiB", 1 / MEBIBYTE)}


def panel(context: Context, record: Record, group: Key, ident: str) -> Panel:
    """Two plots and a table for each axis, and the table of every point."""
    found = entries(record, SweepEntry, group)
    figures, tables = [], []
    for axis in OTHER:
        points, constant = along(found, axis)
        if len({getattr(entry, axis) for entry in points}) < 2:
            continue
        held = f"{NAMES[OTHER[axis]]} {constant:,}"
        tables.append(_matrix(points, axis, held))
        for field in FIELDS:
            figure = _figure(context, points, axis, field, held, f"{ident}-{axis}-{field}")
            figures += [figure] if figure else []
    name = " ".join(group)
    notes = dict.fromkeys(
        f"{e.contender} cannot run B = {e.batch_size:,}, T = {e.seq_len:,}: {e.cannot}"
        for e in found
        if e.cannot is not None
    )
    full = table(f"Every point of {name}", columns.sweep(context.who), found, folded=True)
    return Panel(name, tuple(figures), (full,), tuple(notes), source(record), tuple(tables))


def along(found: Sequence[SweepEntry], axis: str) -> tuple[list[SweepEntry], int]:
    """The points of an axis, and what is held constant along it.

    That is what most of its points have; a point of the other axis that has it too belongs to
    both, and was measured once.
    """
    held = Counter(getattr(entry, OTHER[axis]) for entry in found if entry.axis == axis)
    if not held:
        return [], 0
    constant = held.most_common(1)[0][0]
    return [entry for entry in found if getattr(entry, OTHER[axis]) == constant], constant


def _figure(
    context: Context, points: Sequence[SweepEntry], axis: str, field: str, held: str, ident: str
) -> Figure | None:
    """A line for each contender; None where fewer than two places were measured."""
    what, unit, scale = FIELDS[field]
    ran = [e for e in points if getattr(e, field) is not None and e.cannot is None]
    if len({getattr(entry, axis) for entry in ran}) < 2:
        return None
    series: dict[str, list[SweepEntry]] = {}
    for entry in ran:
        series.setdefault(entry.contender, []).append(entry)
    drawn = [
        Line(
            context.key(several[0]),
            tuple(sorted((getattr(e, axis), getattr(e, field) * scale) for e in several)),
            dashed=several[0].role == "peer",
        )
        for several in series.values()
    ]
    caption = f"{what.capitalize()} against {NAMES[axis]}, {held}. "
    caption += captions.sweep(ran, axis, field)
    plot = lines(drawn, NAMES[axis], f"{what}, {unit}", ident, caption)
    return Figure(plot, caption)


def _matrix(points: Sequence[SweepEntry], axis: str, held: str) -> Table:
    """Places down, contenders across: time, and beneath it peak memory."""
    names = list(dict.fromkeys(entry.contender for entry in points))
    cells = {(getattr(entry, axis), entry.contender): _cell(entry) for entry in points}
    rows = []
    for place in sorted({getattr(entry, axis) for entry in points}):
        across = (cells.get((place, name), Cell(MISSING)) for name in names)
        rows.append(Row((Cell(f"{place:,}"), *across)))
    headers = (Header(NAMES[axis]), *(Header(name, "ms, MiB") for name in names))
    return Table(f"Time, and beneath it peak memory; {held}", headers, tuple(rows))


def _cell(entry: SweepEntry) -> Cell:
    if not entry.ran:
        return Cell(MISSING if entry.cannot is None else "cannot")
    peak = "" if entry.peak_bytes is None else mebibytes(entry.peak_bytes)
    return Cell(milliseconds(entry.time), peak)
