"""A page as data: its devices, their sections, and the panels of each. No HTML."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyllama.harness.machine.distribution import recording
from tinyllama.harness.machine.parsed import tomllib
from tinyllama.harness.page import (
    benchmarks,
    certified,
    claims,
    facts,
    ops,
    panels,
    select,
    sweeps,
    trend,
)
from tinyllama.harness.page.keys import Keys
from tinyllama.harness.page.panels import Context, Panel, Steps
from tinyllama.harness.page.tables import Table
from tinyllama.harness.records.entries import OpEntry, StepEntry, SweepEntry, Timed
from tinyllama.harness.records.results import Record
from tinyllama.harness.records.targets import OpTarget, Target

# Of each section by its name in ids: title, introduction, and what it lacks where it is empty.
SECTIONS = tomllib.loads(Path(__file__).with_name("sections.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Section:
    """empty: what to say without panels."""

    title: str
    ident: str
    intro: str
    panels: tuple[Panel, ...]
    empty: str = ""


@dataclass(frozen=True)
class Device:
    """told: how many bars are met, in words; empty without any."""

    name: str
    ident: str
    told: str
    facts: tuple[tuple[str, str], ...]
    left_out: tuple[str, ...]
    sources: Table | None
    sections: tuple[Section, ...]


@dataclass(frozen=True)
class Page:
    title: str
    devices: tuple[Device, ...]


def page(
    records: Sequence[Record],
    targets: Sequence[Target | OpTarget],
    title: str,
    certificates: Sequence[dict[str, Any]] = (),
) -> Page:
    """Everything a page says."""
    keys, found = Keys(records), select.by_device(records)
    devices = []
    for n, (name, own) in enumerate(found.items()):
        certificate = next((one for one in certificates if one["device"] == name), None)
        context = Context(keys, f"d{n}")
        devices.append(_device(context, name, own, targets, list(found), certificate))
    return Page(title, tuple(devices))


def _device(
    context: Context,
    name: str,
    records: Sequence[Record],
    targets: Sequence[Target | OpTarget],
    devices: Sequence[str],
    certificate: dict[str, Any] | None,
) -> Device:
    ident = context.ident
    steps, timed, swept = (
        select.history(records, kind) for kind in (StepEntry, OpEntry, SweepEntry)
    )
    newest = [runs[-1] for kind in (steps, swept, timed) for runs in kind.values()]
    used = sorted({id(r): r for r in newest}.values(), key=lambda record: record.date)
    rungs = [
        Steps(runs[-1], " ".join(group), select.entries(runs[-1], StepEntry, group))
        for group, runs in steps.items()
    ]
    judged: list[Timed] = [entry for rung in rungs for entry in rung.found]
    judged += [e for g, runs in timed.items() for e in select.entries(runs[-1], OpEntry, g)]
    found = claims.claims(targets, judged, name) if judged else []
    sections: dict[str, Iterable[Panel | None]] = {
        "bars": [claims.panel(context, found, devices)],
        "ladder": [panels.ladder(context, rungs), *(panels.rung(context, rung) for rung in rungs)],
        "roofline": [
            ops.panel(context, runs[-1], dtype, f"{ident}-ops{n}")
            for n, ((dtype,), runs) in enumerate(timed.items())
        ],
        "split": panels.parts(context, rungs),
        "sweep": [
            sweeps.panel(context, runs[-1], group, f"{ident}-sweep{n}")
            for n, (group, runs) in enumerate(swept.items())
        ],
        "history": [
            trend.against(context, steps),
            *(
                trend.panel(context, runs, group, f"{ident}-history{n}")
                for n, (group, runs) in enumerate(steps.items())
            ),
        ],
        "gate": [certified.panel(certificate)] if certificate else [],
        "benchmarks": [benchmarks.panel(context, records)],
    }
    if judged and not (steps or swept):  # ops alone: nothing here is about a training step
        for slug in ("ladder", "split", "sweep", "history"):
            del sections[slug]
    return Device(
        name,
        ident,
        claims.told(found) if found else "",
        facts.machine(used[-1]) if used else (),
        facts.left_out(records, used),
        facts.sources(used) if used else None,
        tuple(_section(ident, slug, some) for slug, some in sections.items()),
    )


def _section(ident: str, slug: str, found: Iterable[Panel | None]) -> Section:
    """A section of a device by its name in ids, with the panels that there are."""
    words = dict(SECTIONS[slug])
    words["empty"] = words.get("empty", "").format(recording=recording())
    return Section(ident=f"{ident}-{slug}", panels=tuple(filter(None, found)), **words)
