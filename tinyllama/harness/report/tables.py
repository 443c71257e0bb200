"""Records as tables of text: for a terminal, and in Markdown."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from tinyllama.harness.records.entries import (
    Contended,
    Entry,
    OpEntry,
    Ratio,
    StepEntry,
    SweepEntry,
    Timed,
    baseline_of,
)
from tinyllama.harness.records.results import Record

E = TypeVar("E", bound=Entry)
Column = tuple[str, Callable[[E], str]]
Rows = list[list[str]]  # the first is the header


def _number(value: float | None, scale: float = 1.0, form: str = ".3g", unit: str = "") -> str:
    if isinstance(value, (int, float)):
        return f"{value * scale:{form}}{unit}"
    return _text(value)  # not a number: the verdict rejects it, the table shows it


def _text(value: Ratio | str | float | None) -> str:
    return "" if value is None else str(value)


def _over(entry: Timed) -> str:
    return "1" if entry.baseline == entry.who else _text(entry.over_baseline)


# Headers carry the units; what was not measured stays empty.
def step_columns(entries: Sequence[StepEntry]) -> list[Column[StepEntry]]:
    return [
        ("contender", lambda e: e.contender),
        ("ms a step", lambda e: _number(e.seconds, 1e3, ".2f")),
        ("samples/s", lambda e: _number(e.samples_per_second, 1, ".0f")),
        (f"over {(baseline_of(entries) or '').capitalize()}", _over),
        ("of the floor", lambda e: _text(e.floor_share)),
        ("peak MiB", lambda e: _number(e.peak_bytes, 2**-20, ".0f")),
        ("kernels", lambda e: _text(e.kernels)),
        ("MFU", lambda e: _number(e.mfu, 100, ".0f", "%")),
        ("mJ a sample", lambda e: _number(e.joules_per_sample, 1e3)),
        ("run as", lambda e: _text(e.plan)),
    ]


def _op_columns(entries: Sequence[OpEntry]) -> list[Column[OpEntry]]:
    return [
        ("op", lambda e: e.op),
        ("case", lambda e: e.case),
        ("provider", lambda e: e.provider),
        ("us", lambda e: _number(e.seconds, 1e6, ".1f")),
        ("host us", lambda e: _number(e.host_seconds, 1e6, ".0f")),
        ("of the roof", lambda e: _number(e.roofline_share, 100, ".0f", "%")),
        ("bound by", lambda e: _text(e.bound)),
        ("peak MiB", lambda e: _number(e.peak_bytes, 2**-20, ".1f")),
        (f"over {baseline_of(entries)}", lambda e: _text(e.over_baseline)),
    ]


SWEEP_COLUMNS: list[Column[SweepEntry]] = [
    ("batch x length", lambda e: f"{e.batch_size} x {e.seq_len}"),
    ("tier", lambda e: e.contender),
    ("ms", lambda e: _number(e.seconds, 1e3, ".3g")),
    ("samples/s", lambda e: _number(e.samples_per_second, 1, ".0f")),
    ("peak MiB", lambda e: _number(e.peak_bytes, 2**-20, ".0f")),
]


def latest(records: Iterable[Record]) -> list[Record]:
    """The newest record of each device and group, by date: the newest complete one, or where none
    is complete the newest of all, whose source says so."""
    newest: dict[tuple[str, str], Record] = {}
    for record in sorted(records, key=lambda record: (record.complete, record.date)):
        newest[record.device, record.group] = record
    return sorted(newest.values(), key=lambda record: record.date)


def last_passes(record: Record) -> list[OpEntry]:
    """The gated entries of ops: forward and backward where an op has both."""
    ops = record.of(OpEntry)
    differentiable = {entry.op for entry in ops if entry.passes == "forward+backward"}
    return [entry for entry in ops if entry.op not in differentiable or entry.passes != "forward"]


def source(record: Record) -> str:
    """What a reader must know to trust a figure: device, versions, commit, date."""
    incomplete = "" if record.complete else "; INCOMPLETE: something in that run failed"
    where = f"{record.device}; {record.software}; commit {record.short_commit}; {record.day}"
    return where + incomplete


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines of text, in columns."""
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(c.ljust(w) for c, w in zip(row, wide, strict=True)).rstrip() for row in rows]


def terminal(records: Sequence[Record]) -> list[str]:
    """Tables of records as lines of text, and what was left out."""
    lines = []
    for record in records:
        for table in tables_of(record):
            lines += [record.group, *aligned(table), source(record), ""]
    return [*lines, *left_out(records)]


def tables_of(record: Record) -> list[Rows]:
    """A table of the steps of a record that were timed, one of its ops and one of its sweep; no
    empty one."""
    steps = [entry for entry in record.of(StepEntry) if entry.cannot is None]
    ops = [entry for entry in last_passes(record) if entry.cannot is None]
    sweep = [entry for entry in record.of(SweepEntry) if entry.cannot is None]
    tables = (
        table_of(step_columns(steps), steps),
        table_of(_op_columns(ops), ops),
        table_of(SWEEP_COLUMNS, sweep),
    )
    return [table for table in tables if len(table) > 1]


def table_of(columns: Sequence[Column[E]], entries: Sequence[E]) -> Rows:
    """The header and a row for each entry, of the columns in which some entry has something."""
    table = [[header for header, _ in columns]]
    table += [[cell(entry) for _, cell in columns] for entry in entries]
    filled = [any(column[1:]) for column in zip(*table, strict=True)]
    return [[cell for cell, some in zip(row, filled, strict=True) if some] for row in table]


def left_out(records: Iterable[Record]) -> list[str]:
    """What did not run, or ran otherwise than planned, and why; each reason once."""
    lines = []
    for entry in (entry for record in records for entry in record.entries):
        if isinstance(entry, Contended):
            ways = (entry.left_out or {}).items()
            lines += [f"{entry.who} without {way}: {reason}" for way, reason in ways]
        if entry.cannot:
            lines.append(f"{entry.who} not timed: {entry.cannot}")
    return list(dict.fromkeys(lines))


# What would begin a tag, an entity, a link's target, or another column.
_MARKUP = {
    r"&(?=#?\w+;)": "&amp;",
    r"<(?=[a-zA-Z/!?])": "&lt;",
    r"\](?=[(\[:])": r"\\]",
    r"\|": r"\\|",
}


def escaped(text: str) -> str:
    """A text of a record, which may come from elsewhere, as one line of Markdown without HTML,
    links or images."""
    text = " ".join(text.split())
    for markup, escape in _MARKUP.items():
        text = re.sub(markup, escape, text)
    return text


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown of texts as they are; the first row is the header."""
    header, *body = [[escaped(cell) for cell in row] for row in rows]
    lines = [header, ["---"] * len(header), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
