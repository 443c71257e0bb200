"""Tables made from records, and from nothing else: for a terminal, and in Markdown."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from tinyllama.harness.records.results import Record

Entry = dict[str, Any]
Column = tuple[str, Callable[[Entry], str]]


def _ratio(entry: Entry, field: str) -> str:
    if field not in entry:
        return ""
    median, low, high = entry[field]
    return f"{median:.2f} [{low:.2f}, {high:.2f}]"


def _number(entry: Entry, field: str, scale: float = 1.0, form: str = ".3g") -> str:
    value = entry.get(field, "")
    return format(value * scale, form) if isinstance(value, (int, float)) else str(value)


def _count(entry: Entry, field: str) -> str:
    return str(entry[field]) if field in entry else ""


def _text(entry: Entry, field: str, otherwise: str = "") -> str:
    return str(entry.get(field, otherwise))


def _reason(entry: Entry) -> str:
    return f"cannot: {entry['cannot']}" if "cannot" in entry else ""


# Headers carry the units; what was not measured stays empty.
STEP_COLUMNS: tuple[Column, ...] = (
    ("contender", lambda e: _text(e, "contender", e["name"])),
    ("ms a step", lambda e: _number(e, "seconds", 1e3, ".2f") or _reason(e)),
    ("samples/s", lambda e: _number(e, "samples_per_second", 1, ".0f")),
    ("over V1", lambda e: _ratio(e, "over_v1") if e.get("contender") != "v1" else "1"),
    ("of the floor", lambda e: _ratio(e, "floor_share")),
    ("peak MiB", lambda e: _number(e, "peak_bytes", 2**-20, ".0f")),
    ("kernels", lambda e: _count(e, "kernels")),
    ("MFU", lambda e: _number(e, "mfu", 100, ".0f") + ("%" if "mfu" in e else "")),
    ("mJ a sample", lambda e: _number(e, "joules_per_sample", 1e3)),
    ("run as", lambda e: _text(e, "plan")),
)

OP_COLUMNS: tuple[Column, ...] = (
    ("op", lambda e: _text(e, "op", e["name"])),
    ("case", lambda e: _text(e, "case")),
    ("provider", lambda e: _text(e, "provider")),
    ("us", lambda e: _number(e, "seconds", 1e6, ".1f") or _reason(e)),
    ("host us", lambda e: _number(e, "host_seconds", 1e6, ".0f")),
    ("of the roof", lambda e: _number(e, "roofline_share", 100, ".0f") + _percent(e)),
    ("bound by", lambda e: _text(e, "bound")),
    ("peak MiB", lambda e: _number(e, "peak_bytes", 2**-20, ".1f")),
    ("over eager", lambda e: _ratio(e, "over_eager")),
)


def _percent(entry: Entry) -> str:
    return "%" if "roofline_share" in entry else ""


def latest(records: Iterable[Record]) -> list[Record]:
    """The newest record of each device and group, in the order of their dates: a complete one,
    or where there is none the newest at all, whose source then says so."""
    newest: dict[tuple[str, str], Record] = {}
    for record in sorted(records, key=lambda record: (record.complete, record.date)):
        newest[record.device, record.group] = record
    return sorted(newest.values(), key=lambda record: record.date)


def of_kind(record: Record, kind: str) -> list[Entry]:
    return [entry for entry in record.entries if entry["kind"] == kind]


def last_passes(record: Record) -> list[Entry]:
    """The op entries that are gated: forward and backward where an op has both."""
    ops = of_kind(record, "op")
    both = {entry.get("op") for entry in ops if entry.get("passes") == "forward+backward"}
    return [e for e in ops if e.get("op") not in both or e.get("passes") != "forward"]


def source(record: Record) -> str:
    """What a reader must know to trust a figure: device, versions, commit, date."""
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    whole = "" if record.complete else "; INCOMPLETE: something in that run failed"
    missed = f"; MISSED: {'; '.join(record.missed)}" if record.missed else ""
    where = f"{record.device}; {versions}; commit {record.commit[:10]}; {record.date[:10]}"
    return where + whole + missed


def terminal(records: Sequence[Record], width: int = 140) -> list[str]:
    """Tables of the steps and ops of records as lines of text, and what was left out."""
    stream = io.StringIO()
    console = Console(file=stream, width=width, markup=False, highlight=False)
    for kind, columns in (("step", STEP_COLUMNS), ("op", OP_COLUMNS)):
        for record in records:
            entries = [e for e in _rows(record, kind) if "cannot" not in e]
            if entries:
                console.print(_table(record, columns, entries))
    return [*stream.getvalue().splitlines(), *left_out(records)]


def _rows(record: Record, kind: str) -> list[Entry]:
    return last_passes(record) if kind == "op" else of_kind(record, kind)


def _table(record: Record, columns: Sequence[Column], entries: Sequence[Entry]) -> Table:
    shown = _shown(columns, entries)
    table = Table(*(header for header, _ in shown), title=record.group, caption=source(record))
    for entry in entries:
        table.add_row(*(cell(entry) for _, cell in shown))
    return table


def _shown(columns: Sequence[Column], entries: Sequence[Entry]) -> list[Column]:
    """The columns in which some entry has something."""
    return [column for column in columns if any(column[1](entry) for entry in entries)]


def left_out(records: Iterable[Record]) -> list[str]:
    """What did not run, or not as it would, and why; each reason once."""
    lines = []
    for entry in (entry for record in records for entry in record.entries):
        name = entry.get("contender") or entry.get("provider", "")
        for way, reason in entry.get("left_out", {}).items():
            lines.append(f"{name} without {way}: {reason}")
        if "cannot" in entry:
            lines.append(f"{name} not timed: {entry['cannot']}")
    return list(dict.fromkeys(lines))


def markdown(records: Sequence[Record]) -> str:
    """The ladders and ops of records as Markdown, each group under a heading, with sources."""
    parts = []
    for record in records:
        steps, ops = _rows(record, "step"), _rows(record, "op")
        if steps:
            parts += [f"### {record.group}", "", _markdown(STEP_COLUMNS, steps), ""]
        if ops:
            parts += [f"### {record.group}", "", _markdown(OP_COLUMNS, ops), ""]
        if steps or ops:
            parts += [f"Measured on {source(record)}.", ""]
    return "\n".join([*parts, *left_out(records)]).rstrip()


def ladder_markdown(records: Sequence[Record]) -> str:
    """One short table of the steps of several groups, for a README."""
    columns: tuple[Column, ...] = (
        ("workload", lambda e: e["workload"]),
        ("precision", lambda e: e["precision"]),
        *STEP_COLUMNS[:7],
        STEP_COLUMNS[-1],
    )
    steps = [entry for record in records for entry in of_kind(record, "step")]
    entries = [entry for entry in _by_size(steps) if "cannot" not in entry]
    return "\n".join([_markdown(columns, entries), "", *_sources(records)])


def _by_size(steps: Sequence[Entry]) -> list[Entry]:
    """Workloads from short to long steps, precisions from long to short ones."""
    least: dict[str, float] = {}
    longest: dict[tuple[str, str], float] = {}
    for entry in steps:
        seconds = entry.get("seconds", 0.0)
        if entry.get("role") == "tier":
            workload, precision = entry["workload"], entry["precision"]
            least[workload] = min(seconds, least.get(workload, seconds))
            key = (workload, precision)
            longest[key] = min(seconds, longest.get(key, seconds))
    return sorted(
        steps,
        key=lambda e: (
            least.get(e["workload"], 0.0),
            -longest.get((e["workload"], e["precision"]), 0.0),
        ),
    )


def parts_markdown(records: Sequence[Record]) -> str:
    """What each part of a tier is worth: a row for each part switched off, a column for each
    workload and precision."""
    entries = [entry for record in records for entry in of_kind(record, "part")]
    groups = list(dict.fromkeys(f"{e['workload']} {e['precision']}" for e in entries))
    cells: dict[str, dict[str, str]] = {}
    for entry in entries:
        seconds = entry.get("seconds") or entry["milliseconds"] * 1e-3  # the first schema's
        text = f"{seconds * 1e3:.2f} ms"
        if entry["contender"] != "v2":
            text += f", {_ratio(entry, 'over_v2')}"
        cells.setdefault(entry["contender"], {})[f"{entry['workload']} {entry['precision']}"] = text
    columns: tuple[Column, ...] = (
        ("V2", lambda e: e["name"]),
        *((group, lambda e, group=group: e.get(group, "")) for group in groups),
    )
    rows = [{"name": name, **row} for name, row in cells.items()]
    return "\n".join([_markdown(columns, rows), "", *_sources(records)])


def ops_markdown(records: Sequence[Record]) -> str:
    """A row for each op, case and dtype, a column for each provider: forward + backward on the
    device, microseconds and the share of the roofline of the same run."""
    entries = [entry for record in records for entry in last_passes(record)]
    entries = [entry for entry in entries if "cannot" not in entry]
    rows: dict[tuple[str, str, str], Entry] = {}
    for entry in entries:
        key = (entry["op"], entry["case"], entry["dtype"])
        row = rows.setdefault(key, dict(zip(("op", "case", "dtype"), key, strict=True)))
        share = f" ({_number(entry, 'roofline_share', 100, '.0f')}%)" if _percent(entry) else ""
        row[entry["provider"]] = _number(entry, "seconds", 1e6, ".1f") + share
    providers = dict.fromkeys(entry["provider"] for entry in entries)
    names = ("op", "case", "dtype", *sorted(providers, key="eager".__ne__))
    columns = [(name, functools.partial(_text, field=name)) for name in names]
    return "\n".join([_markdown(columns, list(rows.values())), "", *_sources(records)])


def _sources(records: Sequence[Record]) -> list[str]:
    """The sources of records, each with the groups that it is the source of."""
    groups: dict[str, list[str]] = {}
    for record in records:
        groups.setdefault(source(record), []).append(record.group)
    return [f"{', '.join(names)}: measured on {text}.\n" for text, names in groups.items()]


def _markdown(columns: Sequence[Column], entries: Sequence[Entry]) -> str:
    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    shown = _shown(columns, entries)
    headers = [header for header, _ in shown]
    rows = [line(cell(entry) for _, cell in shown) for entry in entries]
    return "\n".join([line(headers), line("---" for _ in headers), *rows])
