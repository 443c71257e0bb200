"""Tables made from records, and from nothing else."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from tinyllama.harness.results import Record

HEADERS = ("workload", "precision", "tier", "ms a step", "samples/s", "over V1", "run as")


def ladder_rows(record: Record) -> list[tuple[str, ...]]:
    """A row for each timed step; "over V1" is the median ratio and its 99% interval."""
    return [_row(entry) for entry in record.entries if entry["name"].startswith("step/")]


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    median, low, high = entry["over_v1"]
    return (
        entry["workload"],
        entry["precision"],
        entry["tier"],
        f"{entry['seconds'] * 1e3:.2f}",
        f"{entry['samples_per_second']:.0f}",
        "1" if entry["tier"] == "v1" else f"{median:.2f} [{low:.2f}, {high:.2f}]",
        entry["plan"],
    )


def source(record: Record) -> str:
    """What a reader must know to trust a figure: device, versions, commit, date."""
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    return f"{record.device}; {versions}; commit {record.commit[:10]}; {record.date[:10]}"


def ladder(record: Record, width: int = 100) -> list[str]:
    """The ladder as lines of text."""
    table = Table(*HEADERS, caption=source(record))
    for row in ladder_rows(record):
        table.add_row(*row)
    stream = io.StringIO()
    Console(file=stream, width=width).print(table)
    return [*stream.getvalue().splitlines(), *left_out(record)]


def left_out(record: Record) -> list[str]:
    """What did not run of each tier's plan, and why."""
    lines = [
        f"{entry['tier']} without {way}: {reason}"
        for entry in record.entries
        for way, reason in entry.get("left_out", {}).items()
    ]
    return list(dict.fromkeys(lines))


def markdown(record: Record) -> str:
    """The ladder as a Markdown table with its source."""
    return _markdown(HEADERS, ladder_rows(record), record)


def parts_markdown(record: Record) -> str:
    """What each part of a tier is worth, as a Markdown table with its source.

    A row for each part switched off, a column for each workload and precision.
    """
    entries = [entry for entry in record.entries if entry["name"].startswith("parts/")]
    groups = list(dict.fromkeys(f"{e['workload']} {e['precision']}" for e in entries))
    cells: dict[str, dict[str, str]] = {}
    for entry in entries:
        median, low, high = entry["over_v2"]
        text = f"{entry['milliseconds']:.2f} ms"
        if entry["tier"] != "v2":
            text += f", {median:.2f} [{low:.2f}, {high:.2f}]"
        group = f"{entry['workload']} {entry['precision']}"
        cells.setdefault(entry["tier"], {})[group] = text
    rows = [(tier, *(row[group] for group in groups)) for tier, row in cells.items()]
    return _markdown(("V2", *groups), rows, record)


def _markdown(headers: Iterable[str], rows: Iterable[Iterable[str]], record: Record) -> str:
    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    headers = list(headers)
    lines = [line(headers), line("---" for _ in headers), *map(line, rows)]
    return "\n".join([*lines, "", f"Measured on {source(record)}."])
