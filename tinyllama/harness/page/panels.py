"""Panels: the charts, tables and notes of one group. No HTML."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from tinyllama.harness.page import captions, charts, columns
from tinyllama.harness.page.charts import Bar, Chart, Dot, Part, Scale
from tinyllama.harness.page.keys import Keys
from tinyllama.harness.page.select import fastest, measured
from tinyllama.harness.page.svg import Key, Plot
from tinyllama.harness.page.tables import Cell, Header, Row, Table, absent, table
from tinyllama.harness.records.entries import StepEntry, Timed, baseline_of
from tinyllama.harness.records.numbers import milliseconds, percent, significant
from tinyllama.harness.records.results import Record

PARTS = ("products", "attention", "optimizer", "elementwise", "copies", "other", "idle")


@dataclass(frozen=True)
class Figure:
    plot: Plot | Chart
    caption: str


@dataclass(frozen=True)
class Panel:
    """source: which record it is made from; aside: tables to be read beside the figures. summary:
    of one that is folded, what its row says. strip: of each bar the id of its row, its verdict, the
    mark of that, and a tip."""

    title: str
    figures: tuple[Figure, ...]
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()
    source: str = ""
    aside: tuple[Table, ...] = ()
    summary: str = ""
    strip: tuple[tuple[str, str, str, str], ...] = ()


@dataclass(frozen=True)
class Context:
    """What every panel of a device may ask. ident: the beginning of its ids."""

    keys: Keys
    ident: str

    def key(self, entry: Timed) -> Key:
        return self.keys.of(entry)

    def anchor(self, entry: Timed) -> str:
        """The id of the benchmark's own row."""
        return self.quoted(entry.name)

    def quoted(self, *words: str) -> str:
        """An id of the device, made from some words."""
        return f"{self.ident}-{quote('/'.join(words))}"

    def who(self, entry: Timed) -> Cell:
        """The contender or provider, with its mark, leading to the benchmark's own row."""
        href = f"#{self.anchor(entry)}" if measured([entry]) else ""
        return Cell(entry.who, "peer" if entry.role == "peer" else "", None, self.key(entry), href)


@dataclass(frozen=True)
class Steps:
    """The newest steps of one group: a rung of the ladder."""

    record: Record
    title: str
    found: Sequence[StepEntry]


def source(record: Record) -> str:
    return f"{record.date[:16].replace('T', ' ')} UTC, commit {record.short_commit}"


def ladder(context: Context, groups: Sequence[Steps]) -> Panel | None:
    """Every contender of every group on one axis: the tiers above, floor and peers below."""
    ran = [(group, entry) for group in groups for entry in measured(group.found)]
    if not ran:
        return None
    scale = Scale.around(1e3 * entry.time for _, entry in ran)
    rows = []
    for group in groups:
        best = fastest(group.found, "tier")
        figures = f"{best.contender} {milliseconds(best.time)} ms" if best else ""
        dots = [
            Dot(scale.at(1e3 * e.time), context.key(e), _tip(e), not _is_tier(e))
            for e in measured(group.found)
        ]
        rows.append(Bar(group.title, figures, tuple(dots)))
    said = ", ".join(f"{group.title} {_tip(entry)}" for group, entry in ran)
    keys = dict.fromkeys(context.key(entry) for _, entry in ran)
    chart = Chart(
        tuple(rows), scale.ticks(), "ms / step, less is better", f"Ladder: {said}", tuple(keys)
    )
    caption = "Above each line the tiers, below it the floor and the peers."
    return Panel("All groups", (Figure(chart, caption),))


def _tip(entry: StepEntry) -> str:
    text = f"{entry.contender} {milliseconds(entry.time)} ms"
    if entry.over_baseline and entry.contender != entry.baseline:
        text += f", {significant(entry.over_baseline.median)}× as fast as {entry.baseline}"
    return text


def rung(context: Context, group: Steps) -> Panel:
    """A row that opens: the fastest tier of a group, and the table of all contenders."""
    wanted = columns.step(context.who, baseline_of(group.found))
    full = table(f"A step of {group.title}", wanted, group.found, strong=_is_tier)
    missing = absent(wanted, group.found)
    notes = (f"Not in this record: {', '.join(missing)}.",) if missing else ()
    summary = captions.ladder(group.found)
    return Panel(group.title, (), (full,), notes, source(group.record), (), summary)


def _is_tier(entry: StepEntry) -> bool:
    return entry.role == "tier"


def parts(context: Context, groups: Sequence[Steps]) -> list[Panel]:
    """Where the time of a step goes, by kind of kernel: the fastest tier of each group in one
    chart, then for each group all contenders."""
    known = [(group, [e for e in measured(group.found) if e.time_by]) for group in groups]
    known = [(group, found) for group, found in known if found]
    best = [(group.title, fastest(found, "tier")) for group, found in known]
    rows = [(title, entry) for title, entry in best if entry]
    first = [Panel("The fastest tier of each group", (_stacks(context, rows),))] if rows else []
    return first + [_split(context, group, found) for group, found in known]


def _split(context: Context, group: Steps, found: Sequence[StepEntry]) -> Panel:
    seconds = {entry.contender: _seconds(entry) for entry in found}
    names = [name for name in PARTS if any(each[name] for each in seconds.values())]
    headers = (Header("contender"), *(Header(name, "ms, %") for name in names))
    cells = tuple(
        Row((context.who(e), *(_share(e, seconds[e.contender][name]) for name in names)))
        for e in found
    )
    shares = Table(f"Parts of a step of {group.title}", headers, cells)
    figure = _stacks(context, [(entry.contender, entry) for entry in found])
    said = captions.parts(found)
    return Panel(group.title, (figure,), (shares,), (), source(group.record), (), said)


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


def _stacks(context: Context, rows: Sequence[tuple[str, StepEntry]]) -> Figure:
    """A stacked bar of each step under a name. Kernels that ran beside each other count each, so a
    bar may be longer than its step."""
    found = [_seconds(entry) for _, entry in rows]
    whole = max(1.0, *(sum(f.values()) / e.time for f, (_, e) in zip(found, rows, strict=True)))
    bars = tuple(
        _stack(context, name, entry, seconds, whole)
        for (name, entry), seconds in zip(rows, found, strict=True)
    )
    names = [name for name in PARTS if any(each[name] for each in found)]
    keys = tuple(Key(name, f"part-{name}", "bar") for name in names)
    said = "; ".join(f"{b.name} {b.figures}: {', '.join(p.tip for p in b.parts)}" for b in bars)
    label = f"Parts of a step: {said}"
    caption = "More than 100%: kernels ran beside each other." if whole > 1.01 else ""
    return Figure(Chart(bars, charts.shares(whole), "% of the step", label, keys), caption)


def _stack(
    context: Context, name: str, entry: StepEntry, found: Mapping[str, float], whole: float
) -> Bar:
    parts = tuple(
        Part(
            100 * seconds / entry.time / whole, f"part-{part}", f"{part} {milliseconds(seconds)} ms"
        )
        for part, seconds in found.items()
        if seconds > 0
    )
    who = "" if name == entry.contender else f"{entry.contender} "
    figures = f"{who}{milliseconds(entry.time)} ms"
    return Bar(name, figures, (), parts, context.key(entry))
