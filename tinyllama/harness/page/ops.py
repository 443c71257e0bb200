"""The panel of single ops: a roofline for each pass, what each reaches, every measurement."""

from collections.abc import Sequence

from tinyllama.harness.page import captions, columns
from tinyllama.harness.page.panels import Context, Figure, Panel, source
from tinyllama.harness.page.roofline import Mark, roofline
from tinyllama.harness.page.select import entries, measured
from tinyllama.harness.page.tables import Cell, Header, Row, Table, table
from tinyllama.harness.records.entries import CeilingEntry, OpEntry, baseline_of
from tinyllama.harness.records.numbers import MISSING, percent, significant
from tinyllama.harness.records.results import Record

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def panel(context: Context, record: Record, dtype: str, ident: str) -> Panel:
    """A roofline for each pass, and the table of every measurement."""
    found = entries(record, OpEntry, (dtype,))
    ceilings = record.of(CeilingEntry)
    bandwidth = max((e.bytes_per_second for e in ceilings if e.bytes_per_second), default=None)
    peaks = [e.flops_per_second for e in ceilings if e.flops_per_second]
    letters = dict(zip(dict.fromkeys(e.op for e in found), LETTERS, strict=False))
    figures = []
    for number, passes in enumerate(dict.fromkeys(e.passes for e in found)):
        largest = _largest([e for e in measured(found) if e.passes == passes])
        placed = [e for e in largest if e.flops and e.bytes and e.op in letters]
        if placed:
            marks = [_mark(context, entry, letters) for entry in placed]
            label = f"Roofline of {record.device}, {dtype}, {passes}: "
            label += "; ".join(mark.tip for mark in marks)
            name = f"{ident}-{number}"
            plot = roofline(marks, bandwidth, peaks, name, label)
            figures.append(Figure(plot, f"{passes.capitalize()}{captions.roofline(placed)}"))
    ordered = sorted(found, key=lambda e: (e.op, e.case, e.passes, e.seconds or 0))
    notes = ["Of each op the case that moves the most bytes is drawn."]
    limits = captions.ceilings(ceilings)
    notes.append(
        f"Ceilings, measured in the same run: {'; '.join(limits)}."
        if limits
        else "This record has no ceilings."
    )
    wanted = columns.op(context.who, baseline_of(found))
    full = table(f"Ops in {dtype}", wanted, ordered, folded=True)
    key = _key(found, letters)
    return Panel(dtype, tuple(figures), (full,), tuple(notes), source(record), (key,))


def _key(found: Sequence[OpEntry], letters: dict[str, str]) -> Table:
    """Letter and op, and how near the best of ours and of the peers come to the roofline."""
    columns = [
        (passes, role)
        for passes in dict.fromkeys(e.passes for e in found)
        for role in dict.fromkeys(e.role for e in found)
    ]
    rows = []
    for op, letter in letters.items():
        drawn = _largest([entry for entry in measured(found) if entry.op == op])
        cells = [Cell(f"{letter} {op}")]
        for column in columns:
            reached = [
                (entry.roofline_share, entry.provider)
                for entry in drawn
                if (entry.passes, entry.role) == column and entry.roofline_share is not None
            ]
            share, best = max(reached, key=lambda pair: pair[0], default=(None, ""))
            cells.append(Cell(MISSING) if share is None else Cell(percent(share), best, share))
        rows.append(Row(tuple(cells)))
    headers = (Header("op"), *(Header(_brief(p), f"{role}, %", p) for p, role in columns))
    return Table("Best share of the roofline", headers, tuple(rows))


def _brief(passes: str) -> str:
    return passes.replace("forward", "fwd").replace("backward", "bwd")


def _largest(found: Sequence[OpEntry]) -> list[OpEntry]:
    """Of each op, provider and pass the case that moves the most bytes."""
    best: dict[tuple[str, str, str], OpEntry] = {}
    for entry in found:
        name = entry.op, entry.provider, entry.passes
        if name not in best or (entry.bytes or 0) > (best[name].bytes or 0):
            best[name] = entry
    return list(best.values())


def _mark(context: Context, entry: OpEntry, letters: dict[str, str]) -> Mark:
    assert entry.flops, entry.name
    assert entry.bytes, entry.name
    rate = entry.flops / entry.time
    tip = f"{entry.op} by {entry.provider}: {significant(rate / 1e12)} TFLOP/s"
    if entry.roofline_share is not None:
        tip += f", {percent(entry.roofline_share)}% of its roofline"
    return Mark(letters[entry.op], context.key(entry), entry.flops / entry.bytes, rate, tip)
