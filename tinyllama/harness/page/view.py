"""A page as data: its devices, their sections, and the panels of each. No HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyllama.harness.machine.toml import tomllib
from tinyllama.harness.page import (
    certified,
    changes,
    claims,
    facts,
    ops,
    panels,
    select,
    sweeps,
    trend,
)
from tinyllama.harness.page.panels import Context, Panel
from tinyllama.harness.page.tables import Cell, Header, Row, Table
from tinyllama.harness.records import history, numbers
from tinyllama.harness.records.entries import OpEntry, Ratio, StepEntry, SweepEntry, baseline_of
from tinyllama.harness.records.results import Record
from tinyllama.harness.records.targets import Target

# Of each section by its name in ids: title, introduction, and what it lacks where it is empty.
SECTIONS = tomllib.loads(Path(__file__).with_name("sections.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Section:
    """empty: what to say without panels. beside: a panel's plot and table stand side by side."""

    title: str
    ident: str
    intro: str
    panels: tuple[Panel, ...]
    empty: str = ""
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
    return Page(
        title,
        tuple(devices),
        _summary(found),
        claims.documented(targets, records),
        claims.never_run(targets, records),
    )


def _summary(found: Mapping[str, Sequence[Record]]) -> Table | None:
    """The fastest tier of each device and group, beside the baseline and the fastest peer."""
    ladders = [
        (device, group, runs[-1], select.entries(runs[-1], StepEntry, group))
        for device, records in found.items()
        for group, runs in select.history(records, StepEntry).items()
    ]
    rows = []
    for device, group, record, entries in ladders:
        best, peer = select.fastest(entries, "tier"), select.fastest(entries, "peer")
        name = baseline_of(entries)
        first = next((e for e in select.measured(entries) if e.contender == name), None)
        if best:
            cells = (
                *(Cell(device, record.date[:10]), Cell(" ".join(group)), _time(first)),
                *(Cell(best.contender), _time(best)),
                *(_ratio(best.over_baseline), _ratio(best.floor_share, 100)),
                *(Cell(peer.contender if peer else numbers.MISSING), _time(peer)),
            )
            rows.append(Row(cells))
    baselines = {baseline_of(entries) for *_, entries in ladders} - {None}
    baseline = baselines.pop() if len(baselines) == 1 else "baseline"
    headers = (
        *(Header("device"), Header("group", words=True), Header(f"{baseline}", "ms / step")),
        *(Header("fastest tier", words=True), Header("time", "ms / step")),
        *(Header(f"over {baseline}", "×, 99%"), Header("floor share", "%, 99%")),
        *(Header("fastest peer", words=True), Header("time", "ms / step")),
    )
    caption = "The fastest tier of each device and group"
    return Table(caption, headers, tuple(rows)) if rows else None


def _time(entry: StepEntry | None) -> Cell:
    return Cell(numbers.milliseconds(entry.time) if entry else numbers.MISSING)


def _ratio(value: Ratio | None, scale: float = 1.0) -> Cell:
    if value is None:
        return Cell(numbers.MISSING)
    return Cell(numbers.significant(value.median * scale), numbers.interval(value, scale))


def _device(
    context: Context,
    ident: str,
    name: str,
    records: Sequence[Record],
    certificate: dict[str, Any] | None,
) -> Device:
    steps, timed, swept = (
        select.history(records, kind) for kind in (StepEntry, OpEntry, SweepEntry)
    )
    newest = [runs[-1] for kind in (steps, swept, timed) for runs in kind.values()]
    used = sorted({id(r): r for r in newest}.values(), key=lambda record: record.date)
    ladders, splits, trends = [], [], []
    for n, (group, runs) in enumerate(steps.items()):
        record, title = runs[-1], " ".join(group)
        found = select.entries(record, StepEntry, group)
        ladders.append(panels.ladder(context, record, title, found, f"{ident}-ladder{n}"))
        splits.append(panels.split(record, title, found, f"{ident}-split{n}"))
        trends.append(trend.panel(context, runs, group, f"{ident}-history{n}"))
    roofs = [
        ops.panel(context, runs[-1], dtype, f"{ident}-ops{n}")
        for n, ((dtype,), runs) in enumerate(timed.items())
    ]
    along = [
        sweeps.panel(context, runs[-1], group, f"{ident}-sweep{n}")
        for n, (group, runs) in enumerate(swept.items())
    ]
    unsearched = history.unsearched(records)
    moved = [] if unsearched else changes.panels(records, f"{ident}-changes")
    sections = (
        _section(ident, "ladder", ladders),
        _section(ident, "roofline", roofs),
        _section(ident, "sweep", along),
        _section(ident, "split", splits),
        _section(ident, "history", trends),
        _section(ident, "changes", moved, unsearched),
        _section(ident, "gate", [certified.panel(certificate)] if certificate else []),
    )
    known = facts.machine(used[-1]) if used else ()
    sources = facts.sources(used) if used else None
    return Device(name, ident, known, facts.left_out(records, used), sources, sections)


def _section(ident: str, slug: str, found: Iterable[Panel | None], empty: str = "") -> Section:
    """A section of a device by its name in ids, with the panels that there are."""
    words = {**SECTIONS[slug], **({"empty": empty} if empty else {})}
    return Section(ident=f"{ident}-{slug}", panels=tuple(filter(None, found)), **words)
