"""A page as data: devices, their sections, the panels of each. No HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tinyllama.harness.page import (
    certified,
    changes,
    claims,
    facts,
    numbers,
    ops,
    panels,
    select,
    sweeps,
    trend,
)
from tinyllama.harness.page.claims import Target
from tinyllama.harness.page.panels import Context, Panel
from tinyllama.harness.page.tables import Cell, Header, Row, Table
from tinyllama.harness.records import history
from tinyllama.harness.records.results import Record

FILL = "pytest perf_tests --record"


@dataclass(frozen=True)
class Section:
    """empty: what is missing, when there are no panels; beside: a panel is a plot and a table."""

    title: str
    ident: str
    intro: str
    panels: tuple[Panel, ...]
    empty: str
    beside: bool = False


@dataclass(frozen=True)
class Device:
    name: str
    ident: str
    facts: tuple[tuple[str, str], ...]
    left_out: tuple[str, ...]
    sources: Table | None
    sections: tuple[Section, ...]


@dataclass(frozen=True)
class Page:
    title: str
    devices: tuple[Device, ...]
    summary: Table | None
    documented: Table | None
    never: str


def page(
    records: Sequence[Record],
    targets: Sequence[Target],
    title: str,
    certificates: Sequence[dict[str, Any]] = (),
) -> Page:
    """Everything a page says."""
    context = Context(records, targets)
    found = select.by_device(records)
    devices = []
    for n, (name, own) in enumerate(found.items()):
        certificate = next((one for one in certificates if one["device"] == name), None)
        devices.append(_device(context, f"d{n}", name, own, certificate))
    rows = [row for name, own in found.items() for row in _summary(name, own)]
    names = (
        *(Header("device"), Header("group", words=True), Header("v1", "ms / step")),
        Header("fastest tier", words=True),
        *(Header("time", "ms / step"), Header("over v1", "×, 99%")),
        *(Header("floor share", "%, 99%"), Header("fastest peer", words=True)),
        Header("time", "ms / step"),
    )
    summary = Table("The fastest tier of each device and group", names, tuple(rows))
    return Page(
        title,
        tuple(devices),
        summary if rows else None,
        claims.documented(targets, records),
        "" if select.has_run(records, claims.AMD) else claims.NEVER,
    )


def _summary(device: str, records: Sequence[Record]) -> Iterable[Row]:
    for group, runs in select.history(records, "step").items():
        found = select.entries(runs[-1], "step", group)
        best = select.fastest(found, "tier")
        first = next((e for e in select.measured(found) if e["contender"] == "v1"), None)
        peer = select.fastest(found, "peer")
        if best:
            yield Row(
                (
                    Cell(device, runs[-1].date[:10]),
                    Cell(" ".join(group)),
                    _time(first),
                    Cell(best["contender"]),
                    _time(best),
                    _ratio(best, "over_v1"),
                    _ratio(best, "floor_share", 100),
                    Cell(peer["contender"] if peer else numbers.MISSING),
                    _time(peer),
                )
            )


def _time(entry: select.Entry | None) -> Cell:
    return Cell(numbers.milliseconds(entry["seconds"]) if entry else numbers.MISSING)


def _ratio(entry: select.Entry, field: str, scale: float = 1.0) -> Cell:
    value = entry.get(field)
    if value is None:
        return Cell(numbers.MISSING)
    return Cell(numbers.significant(value[0] * scale), numbers.interval(value, scale))


def _device(
    context: Context,
    ident: str,
    name: str,
    records: Sequence[Record],
    certificate: dict[str, Any] | None,
) -> Device:
    kinds = {kind: select.history(records, kind) for kind in select.GROUPING}
    newest = {kind: {key: runs[-1] for key, runs in of.items()} for kind, of in kinds.items()}
    used = list({id(r): r for of in newest.values() for r in of.values()}.values())
    used.sort(key=lambda record: record.date)
    steps = newest["step"].items()
    found = {group: select.entries(record, "step", group) for group, record in steps}
    ladders, splits, histories = [], [], []
    for n, (group, record) in enumerate(steps):
        title = " ".join(group)
        ladders.append(panels.ladder(context, record, title, found[group], f"{ident}-ladder{n}"))
        splits.append(panels.split(record, title, found[group], f"{ident}-split{n}"))
        runs = kinds["step"][group]
        histories.append(trend.panel(context, runs, group, f"{ident}-history{n}"))
    roofs = [
        ops.panel(context, record, dtype, f"{ident}-ops{n}")
        for n, ((dtype,), record) in enumerate(newest["op"].items())
    ]
    swept = [
        sweeps.panel(context, record, group, f"{ident}-sweep{n}")
        for n, (group, record) in enumerate(newest["sweep"].items())
    ]
    sections = _sections(ident, ladders, roofs, swept, splits, histories)
    sections += (_changes(ident, records), _gate(ident, certificate))
    known = facts.machine(used[-1]) if used else ()
    sources = facts.sources(used) if used else None
    return Device(name, ident, known, facts.left_out(records, used), sources, sections)


def _changes(ident: str, records: Sequence[Record]) -> Section:
    """Where figures moved; an empty section says why nothing was looked for."""
    empty = history.unsearched(records)
    found = [] if empty else changes.panels(records, f"{ident}-changes")
    intro = (
        "Levels of a figure over the records of unchanged trees with the same versions, and the "
        "commits between which it moved. It decides nothing: a merge is judged by the gate."
    )
    return Section("Change points", f"{ident}-changes", intro, tuple(found), empty, True)


def _gate(ident: str, certificate: dict[str, Any] | None) -> Section:
    intro = (
        "How often the gate would stop a merge for nothing, and which slowdowns it would find: "
        "merges simulated from blocks in which both sides ran the same code."
    )
    found = (certified.panel(certificate),) if certificate else ()
    empty = "Not certified. This does it: python -m tinyllama certify"
    return Section("The gate", f"{ident}-gate", intro, found, empty)


def _sections(
    ident: str,
    ladders: Sequence[Panel],
    roofs: Sequence[Panel],
    swept: Sequence[Panel],
    splits: Sequence[Panel | None],
    histories: Sequence[Panel | None],
) -> tuple[Section, ...]:
    def section(
        title: str, slug: str, intro: str, found: Iterable[Panel | None], lack: str, beside: bool
    ) -> Section:
        kept = tuple(panel for panel in found if panel)
        return Section(title, f"{ident}-{slug}", intro, kept, f"{lack} {FILL}", beside)

    return (
        section(
            "Ladder",
            "ladder",
            "One training step: forward, loss, backward, AdamW. The contenders of a group took "
            "turns in one run, and every ratio is formed within it.",
            ladders,
            "No complete record of a step. This would make one:",
            True,
        ),
        section(
            "Roofline",
            "roofline",
            "FLOP/s over FLOP per byte, bytes being the fewest that must move; the lines are "
            "ceilings measured in the same run. Each op has a letter; filled marks "
            "are ours, hollow ones peers.",
            roofs,
            "No complete record of single ops. This would make one:",
            False,
        ),
        section(
            "Length and batch",
            "sweep",
            "A step at other sequence lengths and batches, logarithmic on both axes.",
            swept,
            "No complete record of a sweep. This would make one:",
            False,
        ),
        section(
            "Where a step's time goes",
            "split",
            "Time in kernels by kind, as a share of the contender's own step; idle is the rest, in "
            "which no kernel ran.",
            splits,
            "No complete record says which kernels a step ran. This would make one:",
            False,
        ),
        section(
            "History",
            "history",
            "Absolute times of different runs, on logarithmic axes, runs evenly spaced: no ratio "
            "is formed between them. A dotted line and hollow marks: the versions changed.",
            histories,
            "Fewer than two complete records of any group. This adds one:",
            False,
        ),
    )
