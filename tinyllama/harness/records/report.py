"""Tables made from records, and from nothing else: for a terminal, and in Markdown."""

import io
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import IO, TypeVar

from rich.console import Console
from rich.table import Table

from tinyllama.harness.records.entries import (
    Contended,
    Entry,
    OpEntry,
    Ratio,
    StepEntry,
    Timed,
    baseline_of,
)
from tinyllama.harness.records.results import Record

E = TypeVar("E", bound=Entry)
Column = tuple[str, Callable[[E], str]]
Rows = list[list[str]]  # the first is the header
_PIPED_WIDTH = 120  # columns if the terminal's width is unknown; the diagnosis fits


def console(stream: IO[str] | None = None) -> Console:
    """A console on stdout, or another stream, that takes every text literally; names may hold
    brackets."""
    stream = stream or sys.stdout
    width = None if stream.isatty() else _PIPED_WIDTH
    return Console(file=stream, width=width, markup=False, highlight=False, emoji=False)


def _number(value: float | None, scale: float = 1.0, form: str = ".3g", unit: str = "") -> str:
    if isinstance(value, (int, float)):
        return f"{value * scale:{form}}{unit}"
    return _text(value)  # not a number: the verdict rejects it, the table shows it


def _text(value: Ratio | str | float | None) -> str:
    return "" if value is None else str(value)


def _time(entry: Timed, scale: float, form: str) -> str:
    return f"cannot: {entry.cannot}" if entry.cannot else _number(entry.seconds, scale, form)


def _over(entry: Timed) -> str:
    return "1" if entry.baseline == entry.who else _text(entry.over_baseline)


# Headers carry the units; what was not measured stays empty.
def _step_columns(entries: Sequence[StepEntry]) -> list[Column[StepEntry]]:
    return [
        ("contender", lambda e: e.contender),
        ("ms a step", lambda e: _time(e, 1e3, ".2f")),
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
        ("us", lambda e: _time(e, 1e6, ".1f")),
        ("host us", lambda e: _number(e.host_seconds, 1e6, ".0f")),
        ("of the roof", lambda e: _number(e.roofline_share, 100, ".0f", "%")),
        ("bound by", lambda e: _text(e.bound)),
        ("peak MiB", lambda e: _number(e.peak_bytes, 2**-20, ".1f")),
        (f"over {baseline_of(entries)}", lambda e: _text(e.over_baseline)),
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
    both = {entry.op for entry in ops if entry.passes == "forward+backward"}
    return [entry for entry in ops if entry.op not in both or entry.passes != "forward"]


def source(record: Record) -> str:
    """What a reader must know to trust a figure: device, versions, commit, date."""
    whole = "" if record.complete else "; INCOMPLETE: something in that run failed"
    missed = f"; MISSED: {'; '.join(record.missed)}" if record.missed else ""
    where = f"{record.device}; {record.software}; commit {record.short_commit}; {record.date[:10]}"
    return where + whole + missed


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines of text, in columns."""
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(c.ljust(w) for c, w in zip(row, wide, strict=True)).rstrip() for row in rows]


def terminal(records: Sequence[Record], width: int = 140) -> list[str]:
    """Tables of the steps and ops of records as lines of text, and what was left out."""
    stream = io.StringIO()
    console = Console(file=stream, width=width, markup=False, highlight=False)
    tables = [(record, _steps(record, ran=True)) for record in records]
    tables += [(record, _ops(record, ran=True)) for record in records]
    for record, (headers, *rows) in tables:
        if rows:
            table = Table(*headers, title=record.group, caption=source(record))
            for row in rows:
                table.add_row(*row)
            console.print(table)
    return [*stream.getvalue().splitlines(), *left_out(records)]


def _steps(record: Record, *, ran: bool) -> Rows:
    steps = [entry for entry in record.of(StepEntry) if not (ran and entry.cannot)]
    return _rows(_step_columns(steps), steps)


def _ops(record: Record, *, ran: bool) -> Rows:
    ops = [entry for entry in last_passes(record) if not (ran and entry.cannot)]
    return _rows(_op_columns(ops), ops)


def _rows(columns: Sequence[Column[E]], entries: Sequence[E]) -> Rows:
    """The header and a row for each entry, of the columns in which some entry has something."""
    rows = [[cell(entry) for _, cell in columns] for entry in entries]
    return _shown([[header for header, _ in columns], *rows])


def _shown(rows: Rows) -> Rows:
    filled = [any(column[1:]) for column in zip(*rows, strict=True)]
    return [[cell for cell, shown in zip(row, filled, strict=True) if shown] for row in rows]


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


def markdown(records: Sequence[Record]) -> str:
    """The ladders and ops of records as Markdown, each group under a heading, with sources."""
    parts = []
    for record in records:
        tables = [_steps(record, ran=False), _ops(record, ran=False)]
        shown = [table for table in tables if len(table) > 1]
        for table in shown:
            parts += [f"### {escaped(record.group)}", "", markdown_table(table), ""]
        if shown:
            parts += [f"Measured on {escaped(source(record))}.", ""]
    return "\n".join([*parts, *map(escaped, left_out(records))]).rstrip()


def ladder_markdown(records: Sequence[Record]) -> str:
    """One short table of the steps of several groups, for a README."""
    steps = [entry for record in records for entry in record.of(StepEntry)]
    entries = [entry for entry in _by_size(steps) if entry.cannot is None]
    measured = _step_columns(entries)
    columns: list[Column[StepEntry]] = [
        ("workload", lambda e: e.workload),
        ("precision", lambda e: e.precision),
        *measured[:7],
        measured[-1],
    ]
    return "\n".join([markdown_table(_rows(columns, entries)), "", *_sources(records)])


def _by_size(steps: Sequence[StepEntry]) -> list[StepEntry]:
    """Workloads from short to long steps, precisions from long to short ones."""
    least: dict[str, float] = {}
    of_group: dict[tuple[str, ...], float] = {}
    for entry in (entry for entry in steps if entry.role == "tier"):
        seconds = entry.seconds or 0.0
        least[entry.workload] = min(seconds, least.get(entry.workload, seconds))
        of_group[entry.group] = min(seconds, of_group.get(entry.group, seconds))
    return sorted(steps, key=lambda e: (least.get(e.workload, 0.0), -of_group.get(e.group, 0.0)))


def ops_markdown(records: Sequence[Record]) -> str:
    """A row for each op, case and dtype, a column for each provider: forward + backward on the
    device, microseconds and the share of the roofline of the same run."""
    entries = [entry for record in records for entry in last_passes(record) if not entry.cannot]
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for entry in entries:
        share = _number(entry.roofline_share, 100, ".0f", "%")
        text = _number(entry.seconds, 1e6, ".1f") + (f" ({share})" if share else "")
        cells.setdefault(entry.call[:3], {})[entry.provider] = text
    baseline = baseline_of(entries)
    providers = sorted(dict.fromkeys(e.provider for e in entries), key=lambda p: p != baseline)
    rows = [["op", "case", "dtype", *providers]]
    rows += [[*call, *(row.get(name, "") for name in providers)] for call, row in cells.items()]
    return "\n".join([markdown_table(rows), "", *_sources(records)])


def _sources(records: Sequence[Record]) -> list[str]:
    """The sources of records, each with the groups that it is the source of."""
    groups: dict[str, list[str]] = {}
    for record in records:
        groups.setdefault(source(record), []).append(record.group)
    return [
        escaped(f"{', '.join(names)}: measured on {text}.") + "\n" for text, names in groups.items()
    ]


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
    for markup, shown in _MARKUP.items():
        text = re.sub(markup, shown, text)
    return text


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown of texts as they are; the first row is the header."""
    header, *others = [[escaped(cell) for cell in row] for row in rows]
    lines = [header, ["---"] * len(header), *others]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
