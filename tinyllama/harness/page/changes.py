"""Panels of change points: the levels of each group's figures, and where they moved."""

from __future__ import annotations

from collections.abc import Sequence

from tinyllama.harness.page.panels import Figure, Panel
from tinyllama.harness.page.plots import Line, lines
from tinyllama.harness.page.svg import OURS, THEIRS, Key
from tinyllama.harness.page.tables import Cell, Header, Row, Table
from tinyllama.harness.records.history import Change, Series, changes, told, watched
from tinyllama.harness.records.results import Record

DRAWN = 8  # lines of a plot, as many as there are colours
HEADERS = (
    Header("entry", "metric", words=True),
    Header("level", "before → after", "medians, to the neighbouring changes", words=True),
    Header("commits", "", "beneath it what else differs between the two records", words=True),
    Header("from", words=True),
)


def panels(records: Sequence[Record], ident: str) -> list[Panel]:
    """A panel for each group and set of versions of a device that has records enough."""
    groups: dict[tuple[str, ...], list[Series]] = {}
    for series in watched(records):
        versions = (f"{name} {version}" for name, version in series.newest.versions.items())
        groups.setdefault((series.newest.group, *versions), []).append(series)
    return [
        _panel(group, versions, found, f"{ident}{n}")
        for n, ((group, *versions), found) in enumerate(groups.items())
    ]


def _panel(group: str, versions: Sequence[str], series: Sequence[Series], ident: str) -> Panel:
    found = [change for one in series for change in changes(one)]
    dates = sorted({r.record.date[:10] for one in series for r in one.readings})
    notes = (told(len(series), len(found)), f"Of {', '.join(versions)}.")
    rows = tuple(Row(_cells(change)) for change in found)
    tables = (Table(f"Changes of {group}", HEADERS, rows),) if rows else ()
    figures = (_figure(found, group, ident),) if found else ()
    return Panel(group, figures, tables, notes, f"{dates[0]} to {dates[-1]}")


def _cells(change: Change) -> tuple[Cell, ...]:
    series = change.series
    commits = Cell(change.commits, change.machine)
    return Cell(series.entry, series.metric), Cell(change.levels), commits, Cell(change.where)


def _figure(found: Sequence[Change], group: str, ident: str) -> Figure:
    """The series with the largest changes, each in percent of its first level."""
    largest = sorted(found, key=lambda change: -abs(change.percent))
    drawn = list({id(c.series): c.series for c in largest}.values())[:DRAWN]
    dates = sorted({r.record.date for series in drawn for r in series.readings})
    first = {id(c.series): c.before for c in reversed(found)}
    shapes = (*OURS, *THEIRS)
    plotted = [
        Line(
            Key(f"{series.entry} {series.metric}", f"series-{n}", shapes[n]),
            tuple(
                (dates.index(r.record.date), (r.value / first[id(series)] - 1) * 100)
                for r in series.readings
            ),
        )
        for n, series in enumerate(drawn)
    ]
    kept = [change for change in found if any(change.series is series for series in drawn)]
    marks = sorted({dates.index(change.records[1].date) - 0.5 for change in kept})
    caption = f"The dotted lines are the changes of {len(drawn)} series"
    hidden = len({id(change.series) for change in found}) - len(drawn)
    caption += f"; {hidden} more series changed less, and are in the table." if hidden else "."
    label = f"{group}, change points: " + "; ".join(map(str, kept))
    days = [date[5:10] for date in dates]
    plot = lines(
        plotted,
        "record, by date",
        "% from the first level",
        ident,
        label,
        days,
        marks,
        logarithmic=False,
    )
    return Figure(plot, caption)
