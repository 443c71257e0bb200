"""The panel of a group's history: absolute times of different runs."""

from __future__ import annotations

from collections.abc import Sequence

from tinyllama.harness.page import captions
from tinyllama.harness.page.panels import Context, Figure, Panel
from tinyllama.harness.page.plots import Line, lines
from tinyllama.harness.page.select import Key, entries, measured
from tinyllama.harness.records.entries import StepEntry
from tinyllama.harness.records.results import Record


def panel(context: Context, runs: Sequence[Record], group: Key, ident: str) -> Panel | None:
    """Seconds of each tier over the runs of a device; None with fewer than two."""
    times: dict[str, list[tuple[int, StepEntry]]] = {}
    for place, record in enumerate(runs):
        for entry in measured(entries(record, StepEntry, group)):
            if entry.role == "tier":
                times.setdefault(entry.contender, []).append((place, entry))
    if len(runs) < 2 or not times:
        return None
    differ = {
        place: found
        for place in range(1, len(runs))
        if (found := runs[place - 1].other_versions(runs[place], "absent"))
    }
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
    plot = lines(
        drawn,
        "run, by date",
        "ms / step",
        ident,
        f"{runs[0].device}, {title}: {caption}",
        days,
        [place - 0.5 for place in differ],
    )
    notes = []
    for place, changed in differ.items():
        words = (f"{name} {before} → {after}" for name, (before, after) in changed.items())
        notes.append(f"{days[place]}, other versions: {', '.join(words)}")
    return Panel(title, (Figure(plot, caption),), (), tuple(notes))


def _days(runs: Sequence[Record]) -> list[str]:
    """The day of each run, with the time of it where two are of one day."""
    days = [record.date[:10] for record in runs]
    if len(set(days)) == len(days):
        return days
    return [record.date[5:16].replace("T", " ") for record in runs]
