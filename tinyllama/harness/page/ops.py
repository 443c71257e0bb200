"""The panel of single ops: a roofline for each pass, what each reaches, every measurement."""

from __future__ import annotations

from collections.abc import Sequence

from tinyllama.harness.page import captions, columns
from tinyllama.harness.page.numbers import MISSING, percent, significant
from tinyllama.harness.page.panels import Context, Figure, Panel, source
from tinyllama.harness.page.roofline import Mark, roofline
from tinyllama.harness.page.select import Entry, entries, measured
from tinyllama.harness.page.tables import Cell, Header, Row, Table, table
from tinyllama.harness.records.results import Record

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
FOLD = 24  # rows; a longer table is folded


def panel(context: Context, record: Record, dtype: str, ident: str) -> Panel:
    """A roofline for each pass, and the table of every measurement."""
    found = entries(record, "op", (dtype,))
    ceilings = [entry for entry in record.entries if entry["kind"] == "ceiling"]
    letters = dict(zip(dict.fromkeys(e["op"] for e in found), LETTERS, strict=False))
    figures = []
    for number, passes in enumerate(dict.fromkeys(e["passes"] for e in found)):
        largest = _largest([e for e in measured(found) if e["passes"] == passes])
        placed = [e for e in largest if e.get("flops") and e.get("bytes") and e["op"] in letters]
        if placed:
            marks = [_mark(context, entry, letters) for entry in placed]
            label = f"Roofline of {record.device}, {dtype}, {passes}: "
            label += "; ".join(mark.tip for mark in marks)
            name = f"{ident}-{number}"
            plot = roofline(marks, _bandwidth(ceilings), _peaks(ceilings), name, label)
            figures.append(Figure(plot, f"{passes.capitalize()}{captions.roofline(placed)}"))
    ordered = sorted(found, key=lambda e: (e["op"], e["case"], e["passes"], e.get("seconds", 0)))
    notes = ["Of each op the case that moves the most bytes is drawn."]
    limits = captions.ceilings(ceilings)
    notes.append(
        f"Ceilings, measured in the same run: {'; '.join(limits)}."
        if limits
        else "This record has no ceilings."
    )
    full = table(f"Ops in {dtype}", columns.OP, ordered, folded=len(ordered) > FOLD)
    key = _key(found, letters)
    return Panel(dtype, tuple(figures), (full,), tuple(notes), source(record), (key,))


def _key(found: Sequence[Entry], letters: dict[str, str]) -> Table:
    """Letter and op, and how near the best of ours and of the peers come to the roofline."""
    columns = [
        (passes, role)
        for passes in dict.fromkeys(e["passes"] for e in found)
        for role in dict.fromkeys(e["role"] for e in found)
    ]
    rows = []
    for op, letter in letters.items():
        cells = [Cell(f"{letter} {op}")]
        for passes, role in columns:
            drawn = _largest([e for e in measured(found) if e["op"] == op])
            chosen = [e for e in drawn if (e["passes"], e["role"]) == (passes, role)]
            chosen = [e for e in chosen if "roofline_share" in e]
            best = max(chosen, key=lambda e: float(e["roofline_share"]), default=None)
            cells.append(_share(best) if best else Cell(MISSING))
        rows.append(Row(tuple(cells)))
    headers = (Header("op"), *(Header(_brief(p), f"{role}, %", p) for p, role in columns))
    return Table("Best share of the roofline", headers, tuple(rows))


def _brief(passes: str) -> str:
    return passes.replace("forward", "fwd").replace("backward", "bwd")


def _share(entry: Entry) -> Cell:
    share = float(entry["roofline_share"])
    return Cell(percent(share), entry["provider"], share)


def _largest(found: Sequence[Entry]) -> list[Entry]:
    """Of each op, provider and pass the case that moves the most bytes."""
    best: dict[tuple[str, str, str], Entry] = {}
    for entry in found:
        name = entry["op"], entry["provider"], entry["passes"]
        if name not in best or entry.get("bytes", 0) > best[name].get("bytes", 0):
            best[name] = entry
    return list(best.values())


def _mark(context: Context, entry: Entry, letters: dict[str, str]) -> Mark:
    rate = entry["flops"] / entry["seconds"]
    tip = f"{entry['op']} by {entry['provider']}: {significant(rate / 1e12)} TFLOP/s"
    if "roofline_share" in entry:
        tip += f", {percent(entry['roofline_share'])}% of its roofline"
    intensity = entry["flops"] / entry["bytes"]
    return Mark(letters[entry["op"]], context.key(entry), intensity, rate, tip)


def _bandwidth(ceilings: Sequence[Entry]) -> float | None:
    return max((e["bytes_per_second"] for e in ceilings if "bytes_per_second" in e), default=None)


def _peaks(ceilings: Sequence[Entry]) -> list[float]:
    return [e["flops_per_second"] for e in ceilings if "flops_per_second" in e]
