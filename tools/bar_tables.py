"""Tables of the bars in targets.toml: what the newest records measured, and whether it holds.

A bar without a measurement on its device has no row: nothing is known of it yet.
"""

from __future__ import annotations

from collections.abc import Iterator

from tinyllama.bench.targets import OF_OPS, OF_STEPS
from tinyllama.harness.records.entries import OpEntry, Ratio, StepEntry
from tinyllama.harness.records.results import Record
from tinyllama.harness.records.targets import (
    Bounded,
    by_call,
    of_group,
    shown,
)
from tools.result_tables import newest

Row = tuple[str, Bounded, Ratio | None, Record]


def steps() -> str:
    """The bars of training steps, workload by workload."""
    return _table(_step_rows())


def ops() -> str:
    """The bars of single ops, case by case."""
    return _table(_op_rows())


def _step_rows() -> Iterator[Row]:
    for record in (record for group in newest(StepEntry) for record in group):
        entries = {entry.contender: entry for entry in record.of(StepEntry)}
        (group,) = {entry.group for entry in entries.values()}
        for target in of_group(OF_STEPS, *group):
            own = entries.get(target.contender)
            if target.holds_on(record.device) and own and own.ran:
                yield record.group, target, target.measured(entries), record


def _op_rows() -> Iterator[Row]:
    for record in (record for group in newest(OpEntry) for record in group):
        for target in OF_OPS:
            for call, entries in by_call(record.of(OpEntry)).items():
                own = entries.get(target.contender)
                if target.holds_on(record.device) and target.covers(call) and own and own.ran:
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
