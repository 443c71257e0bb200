"""Tables of the bars: what targets.toml asks, what the newest records hold, and whether it does.

A bar on what no record of its device holds has no row: nothing is known of it yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tinyllama
from tinyllama.harness.records.report import of_kind
from tinyllama.harness.records.results import Record
from tinyllama.harness.records.targets import Bounded, load, load_ops, of_group, shown
from tools.result_tables import newest

TARGETS = Path(tinyllama.__file__).parent / "bench" / "targets.toml"
Row = tuple[str, Bounded, list[float] | None, Record]


def steps() -> str:
    """The bars of training steps, workload by workload."""
    return _table(_step_rows())


def ops() -> str:
    """The bars of single ops, case by case."""
    return _table(_op_rows())


def _step_rows() -> Iterator[Row]:
    targets = load(TARGETS)
    for record in (record for group in newest("step") for record in group):
        entries = {entry["contender"]: entry for entry in of_kind(record, "step")}
        first = next(iter(entries.values()))
        for target in of_group(targets, first["workload"], first["precision"]):
            ran = "seconds" in entries.get(target.contender, {})
            if target.holds_on(record.device) and ran:
                yield record.group, target, target.measured(entries), record


def _op_rows() -> Iterator[Row]:
    for record in (record for group in newest("op") for record in group):
        calls: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
        for entry in of_kind(record, "op"):
            call = tuple(entry[name] for name in ("op", "case", "dtype", "passes"))
            calls.setdefault(call, {})[entry["provider"]] = entry
        for target in load_ops(TARGETS):
            for call, entries in calls.items():
                ran = "seconds" in entries.get(target.contender, {})
                covered = target.covers(next(iter(entries.values())))
                if target.holds_on(record.device) and covered and ran:
                    yield ", ".join(call), target, target.measured(entries), record


def _table(rows: Iterator[Row]) -> str:
    every = list(rows)
    if not every:
        return "Nothing is recorded yet."
    held = [found is not None and target.met(found) for _, target, found, _ in every]
    lines = [
        f"{sum(held)} of {len(held)} hold.",
        "",
        "| of | bar | measured | |",
        "|---|---|---|---|",
    ]
    for (where, target, found, _), good in zip(every, held, strict=True):
        by_median = ", by the median" if target.judged_by == "median" else ""
        verdict = "holds" if good else "**missed**"
        lines.append(f"| {where} | {target}{by_median} | {shown(found)} | {verdict} |")
    sources = dict.fromkeys(
        f"{record.group}: {record.device}, commit {record.commit[:10]}, {record.date[:10]}"
        for *_, record in every
    )
    return "\n".join([*lines, "", "Records: " + "; ".join(sources) + "."])
