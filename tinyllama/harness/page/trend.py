"""The panels of history: the last run of each group against the one before, and all runs."""

from collections.abc import Mapping, Sequence

from tinyllama.harness.page import captions
from tinyllama.harness.page.panels import Context, Figure, Panel
from tinyllama.harness.page.plots import Line, lines
from tinyllama.harness.page.select import Key, entries, measured
from tinyllama.harness.page.tables import Cell, Header, Row, Table, ratio
from tinyllama.harness.records.entries import Ratio, StepEntry
from tinyllama.harness.records.numbers import MISSING, milliseconds
from tinyllama.harness.records.results import Record

ROSE, FELL, NONE = "share rose", "share fell", "none seen"
HEADERS = (
    Header("tier", words=True),
    Header("time", "ms / step", "of the last run"),
    Header("before", "ms / step", "of the run before it"),
    Header("share", "%, 99%", "the floor's time over this one, in the last run"),
    Header("before", "%, 99%", "the same in the run before it"),
    Header("change", "", "whether the intervals of the two shares are apart", words=True),
    Header("what else differs", words=True),
)


def against(context: Context, groups: Mapping[Key, Sequence[Record]]) -> Panel | None:
    """The last run of each group beside the one before; None where no group has two."""
    rows: dict[bool, list[Row]] = {False: [], True: []}
    for group, runs in groups.items():
        if len(runs) < 2:
            continue
        before = {e.contender: e for e in measured(entries(runs[-2], StepEntry, group))}
        differ = _differ(runs[-2], runs[-1])
        for entry in measured(entries(runs[-1], StepEntry, group)):
            if entry.role == "tier" and entry.contender in before:
                other = before[entry.contender]
                seen = change(entry.floor_share, other.floor_share)
                row = _row(context, entry, other, runs, (seen, differ or MISSING))
                rows[seen in (MISSING, NONE)].append(row)
    tables = tuple(
        Table("No change seen" if same else "Changed", HEADERS, tuple(some), folded=same)
        for same, some in rows.items()
        if some
    )
    caption = "The last run of each group, and the one before"
    return Panel(caption, (), tables) if tables else None


def _row(
    context: Context,
    last: StepEntry,
    before: StepEntry,
    runs: Sequence[Record],
    told: tuple[str, str],
) -> Row:
    who = context.who(last)
    return Row(
        (
            Cell(who.text, " ".join(last.group), None, who.key, who.href),
            Cell(milliseconds(last.time), runs[-1].date[:10]),
            Cell(milliseconds(before.time), runs[-2].date[:10]),
            *(ratio(entry.floor_share, 100) for entry in (last, before)),
            *map(Cell, told),
        )
    )


def change(last: Ratio | None, before: Ratio | None) -> str:
    """What the 99% intervals of two shares of the floor say; each is formed within one run."""
    if last is None or before is None:
        return MISSING
    if last.low > before.high:
        return ROSE
    return FELL if last.high < before.low else NONE


def _differ(before: Record, after: Record) -> str:
    found = before.other_versions(after, "absent")
    return ", ".join(f"{name} {old} → {new}" for name, (old, new) in found.items())


def panel(context: Context, runs: Sequence[Record], group: Key, ident: str) -> Panel | None:
    """Seconds of each tier over the runs of a device; None with fewer than two."""
    times: dict[str, list[tuple[int, StepEntry]]] = {}
    for place, record in enumerate(runs):
        for entry in measured(entries(record, StepEntry, group)):
            if entry.role == "tier":
                times.setdefault(entry.contender, []).append((place, entry))
    if len(runs) < 2 or not times:
        return None
    differ = {n: d for n in range(1, len(runs)) if (d := _differ(runs[n - 1], runs[n]))}
    drawn = [
        Line(
            context.key(points[0][1]),
            tuple((place, entry.time * 1e3) for place, entry in points),
            hollow=frozenset(i for i, (place, _) in enumerate(points) if place in differ),
        )
        for _, points in sorted(times.items())
    ]
    taken = {name: [e.time for _, e in points] for name, points in sorted(times.items())}
    caption = captions.history(runs, taken)
    title = " ".join(group)
    days = _days(runs)
    label = f"{runs[0].device}, {title}: {caption}"
    marks = [place - 0.5 for place in differ]
    plot = lines(drawn, "run, by date", "ms / step", ident, label, days, marks)
    notes = tuple(f"{days[n]}, other versions: {changed}" for n, changed in differ.items())
    return Panel(title, (Figure(plot, ""),), (), notes, summary=caption)


def _days(runs: Sequence[Record]) -> list[str]:
    """The day of each run, with the time of it where two are of one day."""
    days = [record.date[:10] for record in runs]
    if len(set(days)) == len(days):
        return days
    return [record.date[5:16].replace("T", " ") for record in runs]
