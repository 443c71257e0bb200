"""Panels of change points: the levels of each group's figures, and where they moved."""

from collections.abc import Sequence

from tinyllama.harness.page.panels import Panel
from tinyllama.harness.page.tables import Cell, Header, Row, Table
from tinyllama.harness.records.history import Change, Series, changes, told, watched
from tinyllama.harness.records.results import Record

HEADERS = (
    Header("entry", "metric", words=True),
    Header("level", "before → after", "medians, to the neighbouring changes", words=True),
    Header("commits", "", "beneath it what else differs between the two records", words=True),
    Header("from", words=True),
)


def panels(records: Sequence[Record]) -> list[Panel]:
    """A panel for each group and set of versions of a device that has records enough."""
    groups: dict[tuple[str, ...], list[Series]] = {}
    for series in watched(records):
        versions = (f"{name} {version}" for name, version in series.newest.versions.items())
        groups.setdefault((series.newest.group, *versions), []).append(series)
    return [_panel(group, versions, found) for (group, *versions), found in groups.items()]


def _panel(group: str, versions: Sequence[str], series: Sequence[Series]) -> Panel:
    found = [change for one in series for change in changes(one)]
    dates = sorted({r.record.date[:10] for one in series for r in one.readings})
    notes = (told(len(series), len(found)), f"Of {', '.join(versions)}.")
    rows = tuple(Row(_cells(change)) for change in found)
    tables = (Table(f"Changes of {group}", HEADERS, rows),) if rows else ()
    return Panel(group, (), tables, notes, f"{dates[0]} to {dates[-1]}")


def _cells(change: Change) -> tuple[Cell, ...]:
    series = change.series
    commits = Cell(change.commits, change.machine)
    return Cell(series.entry, series.metric), Cell(change.levels), commits, Cell(change.where)
