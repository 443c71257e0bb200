"""Bars of ours and figures of the published documents, beside what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tinyllama.harness.page.tables import Cell, Header, Row, Table
from tinyllama.harness.records import numbers
from tinyllama.harness.records.entries import Ratio, StepEntry
from tinyllama.harness.records.results import Record
from tinyllama.harness.records.targets import SPEED, Target

# metric -> what it is called with its unit, and units in one of the record's
METRICS: dict[str, tuple[str, float]] = {
    "samples_per_second": ("samples / s", 1.0),
    "tokens_per_second": ("tokens / s", 1.0),
    "peak_bytes": ("peak, MiB", 1 / numbers.MEBIBYTE),
    "live_bytes": ("live, MiB", 1 / numbers.MEBIBYTE),
    "held_bytes": ("held uncaptured, MiB", 1 / numbers.MEBIBYTE),
    "held_peak_bytes": ("peak uncaptured, MiB", 1 / numbers.MEBIBYTE),
    "seconds": ("ms / step", 1e3),
    "mfu": ("MFU, %", 100.0),
    "floor_share": ("floor share, %", 100.0),
}
SIGNS = {">=": "≥", "<=": "≤"}


def never_run(targets: Iterable[Target], records: Sequence[Record]) -> str:
    """The devices with published figures and without a record, in words; empty without any."""
    devices = [record.device for record in records]
    words = (target.never_run(devices) for target in targets if target.documented)
    return numbers.listed(list(dict.fromkeys(filter(None, words))))


def beside(
    targets: Iterable[Target], found: Sequence[StepEntry], device: str, records: Sequence[Record]
) -> Table | None:
    """The targets of one group, each beside the entry that it is about."""
    rows = [
        _row(target, field, entry, device, records)
        for target in targets
        for entry in found
        if entry.contender == target.tier
        and target.covers(entry.call)
        and (target.documented or target.concerns(device))
        and (field := _field(target, entry.baseline))
    ]
    headers = (
        Header("tier"),
        Header("measured", "", "here, with the 99% interval of a ratio"),
        Header("wanted or published", words=True),
        Header("verdict", words=True),
        Header("source", words=True),
    )
    return Table("Bars, and what was published", headers, tuple(rows)) if rows else None


def documented(targets: Iterable[Target], records: Sequence[Record]) -> Table | None:
    """Every figure that the published documents claim of a step."""
    devices = [record.device for record in records]
    rows = [
        Row(
            (
                Cell(target.tier, _group(target)),
                Cell(_bound(target, field), _named(target, field)),
                Cell(target.device, target.never_run(devices)),
                Cell(target.caveat or numbers.MISSING),
                Cell(target.source),
            )
        )
        for target in targets
        if target.documented and (field := _field(target, target.over))
    ]
    names = ("device", "caveat", "source")
    headers = (Header("tier"), Header("figure"), *(Header(name, words=True) for name in names))
    return Table("Published figures", headers, tuple(rows)) if rows else None


def _field(target: Target, baseline: object) -> str | None:
    """The field of a step that the target bounds; None where it is over another contender than
    the floor or the baseline."""
    if target.over is None:
        return target.metric
    if target.metric == SPEED and target.over == "floor":
        return "floor_share"
    return "over_baseline" if target.metric == SPEED and target.over == baseline else None


def _group(target: Target) -> str:
    words = {"workload": target.workload, "precision": target.precision}
    return ", ".join(" or ".join(names) or f"any {what}" for what, names in words.items())


def _named(target: Target, field: str) -> str:
    """A field of a step, with its unit."""
    return f"times {target.over}" if field == "over_baseline" else METRICS.get(field, (field,))[0]


def _scale(field: str) -> float:
    return METRICS.get(field, (field, 1.0))[1]


def _bound(target: Target, field: str) -> str:
    """The bound as it was given: it is not a measurement, and is not rounded like one."""
    bound = float(f"{target.bound * _scale(field):.6g}")
    return f"{bound:,.6f}".rstrip("0").rstrip(".")


def _row(
    target: Target, field: str, entry: StepEntry, device: str, records: Sequence[Record]
) -> Row:
    value, scale = getattr(entry, field), _scale(field)
    measured = Cell(numbers.MISSING)
    if isinstance(value, Ratio):
        measured = Cell(numbers.significant(value.median * scale), numbers.interval(value, scale))
    elif value is not None:
        measured = Cell(numbers.significant(value * scale))
    notes, sign = ["a bar of this project"], f"{SIGNS[target.direction]} "
    if target.documented:
        never = target.never_run(record.device for record in records)
        notes, sign = [f"published for {target.device}", never], ""
    wanted = Cell(sign + _bound(target, field), "; ".join(filter(None, (*notes, target.caveat))))
    verdict = Cell(_verdict(target, value, device))
    cells = (Cell(target.tier, _named(target, field)), measured, wanted, verdict)
    return Row((*cells, Cell(target.source)))


def _verdict(target: Target, value: Ratio | float | None, device: str) -> str:
    """By the whole interval of a ratio: an interval that contains the bound decides nothing."""
    if not target.concerns(device):
        return "none: another device"
    if value is None:
        return "not measured"
    low, high = (value.low, value.high) if isinstance(value, Ratio) else (value, value)
    bound = target.bound
    if target.at_least is None:
        low, high, bound = -high, -low, -bound
    if low >= bound:
        return "met"
    return "missed" if high < bound else "undecided: within the interval"
