"""Panels: the plots, tables and notes of one group. No HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tinyllama.harness.page import captions, claims, columns
from tinyllama.harness.page.plots import Bar, bars
from tinyllama.harness.page.select import measured, names
from tinyllama.harness.page.svg import OURS, PARTS, THEIRS, Key, Plot
from tinyllama.harness.page.tables import Cell, Header, Row, Table, absent, table
from tinyllama.harness.records.entries import StepEntry, Timed, baseline_of
from tinyllama.harness.records.numbers import milliseconds, percent, significant
from tinyllama.harness.records.results import Record
from tinyllama.harness.records.targets import Target


@dataclass(frozen=True)
class Figure:
    plot: Plot
    caption: str


@dataclass(frozen=True)
class Panel:
    """source: which record it is made from; aside: tables to be read beside the figures."""

    title: str
    figures: tuple[Figure, ...]
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()
    source: str = ""
    aside: tuple[Table, ...] = ()


@dataclass(frozen=True)
class Context:
    """What every panel may ask: all records of the page, and the targets."""

    records: Sequence[Record]
    targets: Sequence[Target]

    def key(self, entry: Timed) -> Key:
        """Colour and shape of a contender or a provider, the same in every plot of the page."""
        if entry.role == "floor":
            return Key(entry.who, "floor", "line")
        index = names(self.records, entry).index(entry.who) % 4
        if entry.role == "peer":
            return Key(f"{entry.who} (peer)", f"series-{4 + index}", THEIRS[index], hollow=True)
        return Key(entry.who, f"series-{index}", OURS[index])


def source(record: Record) -> str:
    return f"{record.date[:16].replace('T', ' ')} UTC, commit {record.short_commit}"


def ladder(
    context: Context, record: Record, group: str, found: Sequence[StepEntry], ident: str
) -> Panel:
    """Times of a step as bars, the table, and the targets beside the measured figures."""
    rows = [_rung(context, entry) for entry in measured(found)]
    shown = claims.beside(context.targets, found, record.device, context.records)
    figures: tuple[Figure, ...] = ()
    if rows:
        label = f"Time of a step of {group} on {record.device}: "
        label += "; ".join(row.tip for row in rows)
        plot = bars(rows, "ms / step", ident, label, _roles(found))
        figures = (Figure(plot, captions.ladder(found)),)
    wanted = columns.step(baseline_of(found))
    tables = [table(f"A step of {group}", wanted, found, strong=_is_tier)]
    missing = absent(wanted, found)
    notes = (f"Not in this record: {', '.join(missing)}.",) if missing else ()
    return Panel(group, figures, tuple(tables + ([shown] if shown else [])), notes, source(record))


def _is_tier(entry: StepEntry) -> bool:
    return entry.role == "tier"


def _roles(found: Sequence[StepEntry]) -> list[Key]:
    roles = {entry.role for entry in measured(found)}
    keys = {
        "floor": Key("floor: its parts alone", "floor", "bar"),
        "peer": Key("peers, hatched", "peer", "bar"),
    }
    return [key for role, key in keys.items() if role in roles]


def _rung(context: Context, entry: StepEntry) -> Bar:
    time, ratio = f"{milliseconds(entry.time)} ms", ""
    tip = f"{entry.contender} {time}"
    if entry.over_baseline and entry.contender != entry.baseline:
        ratio = f"{significant(entry.over_baseline.median)}×"
        tip += f", {ratio} as fast as {entry.baseline}"
    aside = entry.role == "peer"
    paint = "peer" if aside else context.key(entry).colour
    spread = None
    if entry.seconds_quartiles:
        spread = entry.seconds_quartiles.low * 1e3, entry.seconds_quartiles.high * 1e3
    parts = ((paint, entry.time * 1e3),)
    return Bar(entry.contender, (time, ratio), parts, tip, spread, _is_tier(entry), aside)


def split(record: Record, group: str, found: Sequence[StepEntry], ident: str) -> Panel | None:
    """Where the time of a step goes, by kind of kernel; None where that was not measured."""
    known = [entry for entry in measured(found) if entry.time_by]
    if not known:
        return None
    seconds = {entry.contender: _seconds(entry) for entry in known}
    rows = [_parts(entry, seconds[entry.contender]) for entry in known]
    names = [name for name in PARTS if any(each[name] for each in seconds.values())]
    keys = [Key(name, f"part-{name}", "bar") for name in names]
    label = f"Where a step of {group} spends its time: " + "; ".join(row.tip for row in rows)
    headers = (Header("contender"), *(Header(name, "ms, %") for name in names))
    cells = tuple(
        Row((Cell(e.contender), *(_share(e, seconds[e.contender][name]) for name in names)))
        for e in known
    )
    shares = Table(f"Parts of a step of {group}", headers, cells, folded=True)
    plot = bars(rows, "% of the step", ident, label, keys)
    figure = Figure(plot, captions.parts(known))
    return Panel(group, (figure,), (shares,), (), source(record))


def _seconds(entry: StepEntry) -> dict[str, float]:
    """Seconds by part; a kind that has no colour counts as "other"."""
    found = dict.fromkeys(PARTS, 0.0)
    for name, seconds in (entry.time_by or {}).items():
        found[name if name in PARTS else "other"] += seconds
    found["idle"] += captions.idle(entry)
    return found


def _share(entry: StepEntry, seconds: float) -> Cell:
    share = seconds / entry.time
    return Cell(milliseconds(seconds), f"{percent(share)}%", share)


def _parts(entry: StepEntry, seconds: Mapping[str, float]) -> Bar:
    found = {name: part for name, part in seconds.items() if part > 0}
    tip = ", ".join(f"{name} {milliseconds(part)} ms" for name, part in found.items())
    parts = tuple((f"part-{name}", part / entry.time * 100) for name, part in found.items())
    name, figures = entry.contender, (f"{milliseconds(entry.time)} ms",)
    return Bar(name, figures, parts, f"{name}: {tip}", strong=_is_tier(entry))
