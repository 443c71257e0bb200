"""Tables of measurements, from the records under results/ and from nothing else.

Only records that git tracks count: what a reader measures must not make the documents stale.
"""

import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tinyllama.bench.targets import OF_OPS, OF_STEPS
from tinyllama.harness.records.entries import (
    Entry,
    LongestEntry,
    OpEntry,
    ScalingEntry,
    StepEntry,
    Timed,
)
from tinyllama.harness.records.report import (
    ladder_markdown,
    latest,
    markdown_table,
    ops_markdown,
    source,
)
from tinyllama.harness.records.results import Record, load
from tinyllama.harness.records.targets import Kind, Standing, covered, judged, shown

ROOT = Path(__file__).resolve().parent.parent


def ladder() -> str:
    """The newest ladders of each device, workload by workload."""
    return "\n\n".join(ladder_markdown(records) for records in newest(StepEntry))


def ops() -> str:
    """The newest timings of each device's ops, provider by provider."""
    return "\n\n".join(ops_markdown(records) for records in newest(OpEntry))


def longest() -> str:
    """The longest sequence that each contender trains on one card, by the newest records."""
    head = ("workload", "contender", "tokens", "ms", "of the product's speed", "peak GiB")
    records = [record for group in newest(LongestEntry) for record in group]
    return _tables((r, [head, *map(_longest, r.of(LongestEntry))]) for r in records)


def scaling() -> str:
    """Training steps on several GPUs beside those on one, by the newest records."""
    head = ("workload", "step", "GPUs", "batch", "ms", "efficiency", "collectives hidden", "plan")
    rows = []
    for record in (record for group in newest(ScalingEntry) for record in group):
        # Sums of gradients by copies between GPUs were a way that training had.
        entries = [entry for entry in record.of(ScalingEntry) if entry.sharing != "copies"]
        rows.append((record, [head, *map(_scaled, entries)]))
    return _tables(rows)


def _scaled(entry: ScalingEntry) -> tuple[str, ...]:
    what = ("-".join(entry.group), entry.contender, f"{entry.ranks}", f"{entry.batch_size}")
    hidden = ""
    if entry.collective_seconds:
        hidden = f"{(entry.hidden_seconds or 0) / entry.collective_seconds:.0%}"
    over = "" if entry.efficiency is None else f"{entry.case}: {entry.efficiency}"
    return (*what, f"{entry.time * 1e3:.2f}", over, hidden, entry.plan or "")


def _tables(found: Iterable[tuple[Record, Sequence[Sequence[str]]]]) -> str:
    """The rows of each record as a table, and their source below it."""
    tables = [f"{markdown_table(rows)}\n\n{source(record)}." for record, rows in found]
    return "\n\n".join(tables) or "Nothing is recorded yet."


def _longest(entry: LongestEntry) -> tuple[str, ...]:
    where = ("-".join(entry.group), entry.contender)
    if not entry.ran:
        return (*where, str(entry.cannot), "", "", "")
    return (
        *where,
        f"{entry.seq_len:,}",
        f"{entry.time * 1e3:,.0f}",
        f"{entry.mfu or 0:.0%}",
        f"{(entry.peak_bytes or 0) / 2**30:.0f}",
    )


def step_bars() -> str:
    """The bars of training steps in targets.toml: a row for each bar, a column for each workload,
    precision and device."""
    return _bars(OF_STEPS, StepEntry, row_for_each_call=False)


def op_bars() -> str:
    """The bars of single ops: a row for each case and bar, a column for each device."""
    return _bars(OF_OPS, OpEntry, row_for_each_call=True)


def _bars(targets: Sequence[Kind], kind: type[Timed], row_for_each_call: bool) -> str:
    """Whether each bar holds. One about a contender without an entry has no cell, and one about a
    field that is newer than the record is not measured: nothing is known of them yet."""
    every = [
        (call, target, target.measured(entries), record)
        for record in (record for group in newest(kind) for record in group)
        for target, call, entries in covered(targets, record.of(kind))
        if (own := entries.get(target.contender)) and own.ran and target.concerns(record.device)
    ]
    if not every:
        return "Nothing is recorded yet."
    held = [target.met(found) for _, target, found, _ in every if found is not None]
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for call, target, found, record in every:
        cell = "not measured"
        if found is not None:
            missed = judged(target, found, record.device).standing is not Standing.MET
            cell = f"{shown(found)} **missed**" if missed else shown(found)
        row = (", ".join(call), str(target)) if row_for_each_call else (str(target),)
        column = record.device if row_for_each_call else f"{'-'.join(call)}, {record.device}"
        rows.setdefault(row, {})[column] = cell
    table = _grid(["of", "bar"] if row_for_each_call else ["bar"], rows)
    sources = dict.fromkeys(
        f"{record.group}: {record.device}, commit {record.short_commit}, {record.date[:10]}"
        for *_, record in every
    )
    unknown = f" {len(every) - len(held)} are not measured yet." if len(held) < len(every) else ""
    text = f"{sum(held)} of {len(held)} hold.{unknown}\n\n{markdown_table(table)}"
    return f"{text}\n\nRecords: {'; '.join(sources)}."


def newest(kind: type[Entry]) -> list[list[Record]]:
    """For each device, the newest complete records of each group with entries of this kind."""
    by_device: dict[str, list[Record]] = {}
    for record in latest(load(path) for path in tracked("results/*/*.json")):
        if record.of(kind):
            by_device.setdefault(record.device, []).append(record)
    return [by_device[device] for device in sorted(by_device)]


def tracked(pattern: str) -> list[Path]:
    """The files of a pattern that git tracks; all of them in an export, which has no git."""
    listed = subprocess.run(
        ["git", "ls-files", f":(glob){pattern}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split("\n")[:-1]
    files = [ROOT / name for name in listed] or list(ROOT.glob(pattern))
    return [path for path in files if path.exists()]  # one may be deleted, and not committed yet


def _grid(head: list[str], rows: Mapping[tuple[str, ...], Mapping[str, str]]) -> list[list[str]]:
    """A row for each key, a column for each name of a cell. head: of the key."""
    columns = sorted({name for cells in rows.values() for name in cells})
    table = [[*head, *columns]]
    for words, cells in sorted(rows.items()):
        table.append([*words, *(cells.get(name, "") for name in columns)])
    return table
