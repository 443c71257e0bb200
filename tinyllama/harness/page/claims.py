"""What was claimed by published documents, what was measured, and the bars of a project."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinyllama.harness.page.panels import Context, Panel
from tinyllama.harness.page.tables import Cell, Header, Row, Table, ratio
from tinyllama.harness.records import numbers
from tinyllama.harness.records.entries import OpEntry, Ratio, StepEntry, Timed
from tinyllama.harness.records.targets import Bounded, OpTarget, Target, covered

# metric -> what it is called with its unit, and units in one of the record's
METRICS: dict[str, tuple[str, float]] = {
    "samples_per_second": ("samples / s", 1.0),
    "peak_bytes": ("peak, MiB", 1 / numbers.MEBIBYTE),
    "live_bytes": ("live, MiB", 1 / numbers.MEBIBYTE),
    "held_bytes": ("held uncaptured, MiB", 1 / numbers.MEBIBYTE),
    "held_peak_bytes": ("peak uncaptured, MiB", 1 / numbers.MEBIBYTE),
    "joules_per_sample": ("J / sample", 1.0),
    "mfu": ("MFU, %", 100.0),
    "bandwidth_share": ("bandwidth, % of a copy", 100.0),
    "gradient_share": ("right gradients, % of all", 100.0),
}
SIGNS = {">=": "≥", "<=": "≤"}
MET, MISSED, OPEN, ELSEWHERE = "met", "missed", "not measured", "another device"
MARKS = {MET: "✓", MISSED: "✗", OPEN: "–", ELSEWHERE: "·"}


@dataclass
class Claim:
    """One metric of one contender of one call. claimed: by documents; bars: of the project; bound:
    those of both that are asserted on this device."""

    first: Bounded
    call: tuple[str, ...]
    own: Mapping[str, Timed]
    claimed: list[Bounded] = field(default_factory=list)
    bars: list[Bounded] = field(default_factory=list)
    bound: list[Bounded] = field(default_factory=list)

    @property
    def found(self) -> Ratio | None:
        return self.first.measured(self.own)

    @property
    def verdict(self) -> str:
        found = self.found
        if not self.bound:
            return ELSEWHERE
        if found is None:
            return OPEN
        return MET if all(target.met(found) for target in self.bound) else MISSED

    @property
    def named(self) -> str:
        """The metric with its unit, or what it is divided by."""
        metric = self.first.metric
        name = METRICS[metric][0] if metric in METRICS else metric
        if self.first.over is None:
            return name
        over = self.first.over
        others = over if isinstance(over, str) else " / ".join(over)
        return f"{name.partition(',')[0].replace('_', ' ')} over {others}"

    @property
    def scale(self) -> float:
        return METRICS.get(self.first.metric, ("", 1.0))[1] if self.first.over is None else 1.0


def claims(
    targets: Iterable[Target | OpTarget], entries: Sequence[Timed], device: str
) -> list[Claim]:
    """The targets that are about these entries of a device, and every claim; those of one metric
    together. Missed ones first, then the other claims, what is not measured, and what is met."""
    found: dict[tuple[object, ...], Claim] = {}
    asked = list(targets)
    about: list[tuple[Bounded, tuple[str, ...], Mapping[str, Timed]]] = []
    for of, kind in ((Target, StepEntry), (OpTarget, OpEntry)):
        own_targets: list[Any] = [target for target in asked if isinstance(target, of)]
        own_entries = [entry for entry in entries if isinstance(entry, kind)]
        about += [each for each in covered(own_targets, own_entries) if _is_about(each[0], each[2])]
    there = {id(target) for target, *_ in about}
    about += [
        (target, tuple("|".join(getattr(target, n)) or "any" for n in target.CALL), {})
        for target in asked
        if _documented(target) and id(target) not in there
    ]
    for target, call, own in about:
        if not _documented(target) and not target.concerns(device):
            continue
        name = (target.contender, target.metric, target.over, target.direction, call)
        claim = found.setdefault(name, Claim(target, call, own))
        (claim.claimed if _documented(target) else claim.bars).append(target)
        claim.bound += [target] if target.concerns(device) else []
    return sorted(found.values(), key=_order)


def _is_about(target: Bounded, own: Mapping[str, Timed]) -> bool:
    """Whether its contender ran; a claim stands in any case."""
    entry = own.get(target.contender)
    return _documented(target) or (entry is not None and entry.ran)


def _documented(target: Bounded) -> bool:
    return isinstance(target, Target) and target.documented


def _order(claim: Claim) -> tuple[bool, bool, bool]:
    return claim.verdict != MISSED, not claim.claimed, claim.verdict == MET


def told(found: Sequence[Claim]) -> str:
    """How many bars are met, in words."""
    bars = [claim.verdict for claim in found if claim.bound]
    counts = ", ".join(f"{bars.count(each)} {each}" for each in (MISSED, OPEN) if each in bars)
    return f"{bars.count(MET)} of {len(bars)} bars met{f'; {counts}' if counts else ''}"


def panel(context: Context, found: Sequence[Claim], devices: Sequence[str]) -> Panel | None:
    """The bars that are missed and what was claimed; then, folded, the others. devices: with
    records."""
    if not found:
        return None
    shown = [claim for claim in found if claim.verdict == MISSED or claim.claimed]
    rest = [claim for claim in found if claim not in shown]
    tables = [
        Table(caption, HEADERS, tuple(_row(context, claim, devices) for claim in some), folded)
        for caption, some, folded in (
            ("Missed, and claimed by documents", shown, False),
            ("The other bars", rest, True),
        )
        if some
    ]
    devices_of = (t.never_run(devices) for claim in found for t in claim.claimed)
    never = numbers.listed(list(dict.fromkeys(filter(None, devices_of))))
    notes = (f"This project has {never}.",) if never else ()
    cells = tuple(
        (ident(context, claim), claim.verdict, MARKS[claim.verdict], _said(claim))
        for claim in found
    )
    return Panel(f"{told(found)}.", (), tuple(tables), notes, strip=cells)


HEADERS = (
    Header("who", words=True),
    Header("verdict", "", "by the median", words=True),
    Header("what", words=True),
    Header("claimed", "", "by published documents; beneath it their caveat", words=True),
    Header("measured", "", "here, with the 99% interval of a ratio"),
    Header("bar", "", "of this project; beneath it its caveat", words=True),
)


def ident(context: Context, claim: Claim) -> str:
    """The id of a claim's row."""
    first = claim.first
    words = (first.contender, first.metric, first.over, first.direction, *claim.call)
    return context.quoted("bar", *map(str, words))


def _said(claim: Claim) -> str:
    where = " ".join(claim.call)
    return f"{claim.first.contender} {claim.named}, {where}: {ratio(claim.found, claim.scale).text}"


def _row(context: Context, claim: Claim, devices: Sequence[str]) -> Row:
    entry = claim.own.get(claim.first.contender)
    who = context.who(entry) if entry else Cell(claim.first.contender)
    cells = (
        Cell(who.text, "", None, who.key, who.href),
        Cell(f"{MARKS[claim.verdict]} {claim.verdict}"),
        Cell(claim.named, " ".join(claim.call)),
        _bounds(claim, claim.claimed, devices),
        ratio(claim.found, claim.scale),
        _bounds(claim, claim.bars, ()),
    )
    return Row(cells, ident=ident(context, claim))


def _bounds(claim: Claim, targets: Sequence[Bounded], devices: Sequence[str]) -> Cell:
    """The bounds as they were given: they are no measurements, and not rounded like them."""
    if not targets:
        return Cell(numbers.MISSING)
    notes = []
    for target in targets:
        where = f"{target.where}, {target.source}" if _documented(target) else ""
        never = target.never_run(devices) if _documented(target) else ""
        notes.append("; ".join(filter(None, (where, never, target.caveat))))
    bounds = (
        ("" if _documented(t) else f"{SIGNS[t.direction]} ") + _exact(t.bound * claim.scale)
        for t in targets
    )
    return Cell(", ".join(bounds), " · ".join(dict.fromkeys(filter(None, notes))))


def _exact(value: float) -> str:
    return f"{float(f'{value:.6g}'):,.6f}".rstrip("0").rstrip(".")
