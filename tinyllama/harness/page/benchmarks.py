"""The table of all benchmarks: how the readings of each scatter, in every run."""

from collections.abc import Iterable, Sequence

from tinyllama.harness.page.keys import SHOWN
from tinyllama.harness.page.panels import Context, Panel
from tinyllama.harness.page.select import measured
from tinyllama.harness.page.tables import Cell, Header, Row, Table
from tinyllama.harness.records.entries import Timed
from tinyllama.harness.records.numbers import MISSING, percent, significant, whole
from tinyllama.harness.records.results import Record

Box = tuple[float, float, float]
RUNS = 4  # the newest of a benchmark, which are drawn
HEADERS = (
    Header("benchmark", words=True),
    Header("median", "ms", "of the last run"),
    Header("quartiles", "ms", "of the last run"),
    Header("between them", "%", "of the median"),
    Header("rounds", "", "of the last run"),
    Header("runs", "", "complete records that have it"),
    Header("quartiles of each run", "ms, newest lowest", f"of the last {RUNS} runs", words=True),
)


def panel(context: Context, records: Iterable[Record]) -> Panel | None:
    """Each benchmark of the sections above that ran in a complete record: its last run, and a
    picture of several."""
    found: dict[str, list[Timed]] = {}
    for record in records:
        for entry in measured(record.of(Timed)) if record.complete else ():
            if isinstance(entry, SHOWN):
                found.setdefault(entry.name, []).append(entry)
    if not found:
        return None
    rows = tuple(_row(context, runs) for runs in found.values())
    table = Table("The last run of each, and how several scatter", HEADERS, rows)
    return Panel(f"{len(rows)} benchmarks", (), (table,), summary="in one table")


def _row(context: Context, runs: Sequence[Timed]) -> Row:
    last = runs[-1]
    edges = last.seconds_quartiles
    boxes, around = _boxes(runs[-RUNS:])
    cells = (
        Cell(last.name, "", None, context.key(last)),
        Cell(significant(last.time * 1e3)),
        Cell("–".join(significant(edge * 1e3) for edge in edges) if edges else MISSING),
        Cell(percent((edges.high - edges.low) / last.time) if edges else MISSING),
        Cell(MISSING if last.rounds is None else whole(last.rounds)),
        Cell(str(len(runs))),
        Cell(around, boxes=boxes),
    )
    return Row(cells, ident=context.anchor(last))


def _boxes(runs: Sequence[Timed]) -> tuple[tuple[Box, ...], str]:
    """A box of each run from quartile to quartile with its median, in percent of the scale, which
    reaches from the least to the most of these; and its ends in ms."""
    spans = [(*run.seconds_quartiles, run.time) for run in runs if run.seconds_quartiles]
    if not spans:
        return (), MISSING
    low, high = min(map(min, spans)), max(map(max, spans))
    scale = 100 / (high - low) if high > low else 0.0
    boxes = tuple(
        ((first - low) * scale, (third - first) * scale, (middle - low) * scale)
        for first, third, middle in spans
    )
    return boxes, f"{significant(low * 1e3)} to {significant(high * 1e3)}"
