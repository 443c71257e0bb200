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
    return stream.getvalue().splitlines()


def markdown(record: Record) -> str:
    """The ladder as a Markdown table with its source."""

    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    rows = [line(HEADERS), line("---" for _ in HEADERS), *map(line, ladder_rows(record))]
    return "\n".join([*rows, "", f"Measured on {source(record)}."])
