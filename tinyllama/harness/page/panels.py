"""Panels: the plots, tables and notes of one group. No HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinyllama.harness.page import captions, claims, columns
from tinyllama.harness.page.claims import Target
from tinyllama.harness.page.numbers import milliseconds, percent, significant
from tinyllama.harness.page.plots import Bar, bars
from tinyllama.harness.page.select import Entry, contenders, measured, providers
from tinyllama.harness.page.svg import OURS, PARTS, THEIRS, Key, Plot
from tinyllama.harness.page.tables import Cell, Header, Row, Table, absent, table
from tinyllama.harness.records.results import Record


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

    def key(self, entry: Entry) -> Key:
        """Colour and shape of a contender or a provider, the same in every plot of the page."""
        kind = "contender" if "contender" in entry else "provider"
        names = (contenders if kind == "contender" else providers)(self.records, entry["role"])
        index = names.index(entry[kind])
        if entry["role"] == "floor":
            return Key(entry[kind], "floor", "line")
        if entry["role"] == "peer":
            colour = f"series-{4 + index % 4}"
            return Key(f"{entry[kind]} (peer)", colour, THEIRS[index % 4], hollow=True)
        return Key(entry[kind], f"series-{index % 4}", OURS[index % 4])


def source(record: Record) -> str:
    return f"{record.date[:16].replace('T', ' ')} UTC, commit {short(record.commit)}"


def short(commit: str) -> str:
    """A commit in ten letters, with its mark of changed files."""
    return commit[:10] + ("+dirty" if commit.endswith("+dirty") else "")


def ladder(
    context: Context, record: Record, group: str, found: Sequence[Entry], ident: str
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
    tables = [table(f"A step of {group}", columns.STEP, found, strong=_is_tier)]
    missing = absent(columns.STEP, found)
    notes = (f"Not in this record: {', '.join(missing)}.",) if missing else ()
    return Panel(group, figures, tuple(tables + ([shown] if shown else [])), notes, source(record))


def _is_tier(entry: Entry) -> bool:
    return bool(entry["role"] == "tier")


def _roles(found: Sequence[Entry]) -> list[Key]:
    roles = {entry["role"] for entry in measured(found)}
    keys = {
        "floor": Key("floor: its parts alone", "floor", "bar"),
        "peer": Key("peers, hatched", "peer", "bar"),
    }
    return [key for role, key in keys.items() if role in roles]


def _rung(context: Context, entry: Entry) -> Bar:
    role = entry["role"]
    time, ratio = f"{milliseconds(entry['seconds'])} ms", ""
    tip = f"{entry['contender']} {time}"
    if "over_v1" in entry and entry["contender"] != "v1":
        ratio = f"{significant(entry['over_v1'][0])}×"
        tip += f", {ratio} as fast as v1"
    paint = "peer" if role == "peer" else context.key(entry).colour
    spread = None
    if "seconds_quartiles" in entry:
        low, high = entry["seconds_quartiles"]
        spread = low * 1e3, high * 1e3
    parts = ((paint, entry["seconds"] * 1e3),)
    strong, aside = role == "tier", role == "peer"
    return Bar(entry["contender"], (time, ratio), parts, tip, spread, strong, aside)


def split(record: Record, group: str, found: Sequence[Entry], ident: str) -> Panel | None:
    """Where the time of a step goes, by kind of kernel; None where that was not measured."""
    known = [entry for entry in measured(found) if entry.get("time_by")]
    if not known:
        return None
    rows = [_parts(entry) for entry in known]
    names = [name for name in PARTS if any(_seconds(e).get(name) for e in known)]
    keys = [Key(name, f"part-{name}", "bar") for name in names]
    label = f"Where a step of {group} spends its time: " + "; ".join(row.tip for row in rows)
    headers = (Header("contender"), *(Header(name, "ms, %") for name in names))
    cells = tuple(Row((Cell(e["contender"]), *(_share(e, name) for name in names))) for e in known)
    shares = Table(f"Parts of a step of {group}", headers, cells, folded=True)
    plot = bars(rows, "% of the step", ident, label, keys)
    figure = Figure(plot, captions.parts(known))
    return Panel(group, (figure,), (shares,), (), source(record))


def _seconds(entry: Entry) -> dict[str, float]:
    """Seconds by part; a kind that has no colour counts as "other"."""
    found = {name: 0.0 for name in PARTS}
    for name, seconds in entry["time_by"].items():
        found[name if name in PARTS else "other"] += seconds
    found["idle"] += captions.idle(entry)
    return found


def _share(entry: Entry, name: str) -> Cell:
    seconds = _seconds(entry)[name]
    share = seconds / entry["seconds"]
    return Cell(milliseconds(seconds), f"{percent(share)}%", share)


def _parts(entry: Entry) -> Bar:
    found = {name: seconds for name, seconds in _seconds(entry).items() if seconds > 0}
    figures = (f"{milliseconds(entry['seconds'])} ms",)
    tip = ", ".join(f"{name} {milliseconds(seconds)} ms" for name, seconds in found.items())
    whole = entry["seconds"] / 100
    parts = tuple((f"part-{name}", seconds / whole) for name, seconds in found.items())
    strong = _is_tier(entry)
    return Bar(entry["contender"], figures, parts, f"{entry['contender']}: {tip}", strong=strong)
