"""Bars of ours and figures of the published documents, beside what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tinyllama.harness.page import numbers
from tinyllama.harness.page.select import Entry, has_run
from tinyllama.harness.page.tables import Cell, Header, Row, Table
from tinyllama.harness.records.results import Record

Target = Mapping[str, Any]

AMD = "MI325X"
NEVER = "never run on AMD hardware"
ANY = "any"
NAMES = {
    "over_v1": "times v1",
    "samples_per_second": "samples / s",
    "tokens_per_second": "tokens / s",
    "peak_bytes": "peak, MiB",
    "live_bytes": "live, MiB",
    "seconds": "ms / step",
    "mfu": "MFU, %",
    "floor_share": "floor share, %",
}
SCALES = {"peak_bytes": 1 / numbers.MEBIBYTE, "live_bytes": 1 / numbers.MEBIBYTE, "seconds": 1e3}
SCALES |= {"mfu": 100.0, "floor_share": 100.0}
SIGNS = {">=": "≥", "<=": "≤"}


def scaled(metric: str, value: float) -> str:
    return numbers.significant(value * SCALES.get(metric, 1.0))


def named(metric: str) -> str:
    """A field of a step, with its unit."""
    return NAMES.get(metric, metric)


def _bound(target: Target) -> str:
    """What is wanted or claimed, as it was given: it is not a measurement to be rounded."""
    bound = float(f"{target['bound'] * SCALES.get(target['metric'], 1.0):.6g}")
    return f"{bound:,.6f}".rstrip("0").rstrip(".")


def beside(
    targets: Iterable[Target], found: Sequence[Entry], device: str, records: Sequence[Record]
) -> Table | None:
    """The targets of one group, each beside the entry that it speaks of."""
    rows = []
    for target in targets:
        for entry in found:
            if _concerns(target, entry, device):
                rows.append(_row(target, entry, device, records))
    headers = (
        Header("tier"),
        Header("measured", "", "here, with the 99% interval of a ratio"),
        Header("wanted or published", words=True),
        Header("verdict", words=True),
        Header("source", words=True),
    )
    return Table("Bars, and what was published", headers, tuple(rows)) if rows else None


def documented(targets: Iterable[Target], records: Sequence[Record]) -> Table | None:
    """Every figure that the published documents claim."""
    rows = []
    for target in targets:
        if target["documented"]:
            cells = (
                Cell(target["tier"], _group(target)),
                Cell(_bound(target), named(target["metric"])),
                Cell(target["device"], _never(target, records)),
                Cell(target["caveat"] or numbers.MISSING),
                Cell(target["source"]),
            )
            rows.append(Row(cells))
    names = ("device", "caveat", "source")
    headers = (Header("tier"), Header("figure"), *(Header(name, words=True) for name in names))
    return Table("Published figures", headers, tuple(rows)) if rows else None


def _group(target: Target) -> str:
    words = [("workload", target["workload"]), ("precision", target["precision"])]
    return ", ".join(f"any {what}" if name == ANY else name for what, name in words)


def _concerns(target: Target, entry: Entry, device: str) -> bool:
    """Documented figures stand beside every device, bars beside that for which they are."""
    return (
        entry["contender"] == target["tier"]
        and target["workload"] in (ANY, entry["workload"])
        and target["precision"] in (ANY, entry["precision"])
        and (bool(target["documented"]) or _of(target, device))
    )


def _of(target: Target, device: str) -> bool:
    return target["device"] == ANY or target["device"] in device


def _never(target: Target, records: Sequence[Record]) -> str:
    """What must stand by a figure of AMD's card until there is a record of one."""
    return NEVER if AMD in target["device"] and not has_run(records, AMD) else ""


def _row(target: Target, entry: Entry, device: str, records: Sequence[Record]) -> Row:
    metric = target["metric"]
    value = entry.get(metric)
    measured = Cell(numbers.MISSING)
    if isinstance(value, list):
        edges = numbers.interval(value, SCALES.get(metric, 1.0))
        measured = Cell(scaled(metric, value[0]), edges)
    elif value is not None:
        measured = Cell(scaled(metric, value))
    notes = ["a bar of this project"]
    if target["documented"]:
        notes = [f"published for {target['device']}", _never(target, records)]
    notes.append(target["caveat"])
    sign = "" if target["documented"] else f"{SIGNS[target['direction']]} "
    wanted = Cell(sign + _bound(target), "; ".join(filter(None, notes)))
    cells = (
        Cell(target["tier"], named(metric)),
        measured,
        wanted,
        Cell(_verdict(target, value, device)),
        Cell(target["source"]),
    )
    return Row(cells)


def _verdict(target: Target, value: Any, device: str) -> str:
    """By the whole interval of a ratio: one that holds the bound decides nothing."""
    if not _of(target, device):
        return "none: another device"
    if value is None:
        return "not measured"
    low, high = (value[1], value[2]) if isinstance(value, list) else (value, value)
    bound = target["bound"]
    if target["direction"] == "<=":
        low, high, bound = -high, -low, -bound
    if low >= bound:
        return "met"
    return "missed" if high < bound else "undecided: within the interval"
