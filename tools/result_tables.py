"""Tables of measurements, from the records under results/ and from nothing else.

Only records that git tracks count: what a reader measures must not make the documents stale.
"""

import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tinyllama.bench.targets import TARGETS
from tinyllama.harness.records.entries import (
    Entry,
    LongestEntry,
    OpEntry,
    ScalingEntry,
    StepEntry,
    Timed,
)
from tinyllama.harness.records.results import Record, load
from tinyllama.harness.records.targets import covered, shown
from tinyllama.harness.report.tables import (
    Column,
    escaped,
    last_passes,
    latest,
    markdown_table,
    source,
    step_columns,
    table_of,
)

ROOT = Path(__file__).resolve().parent.parent


def ladder() -> str:
    """The newest ladders of each device, workload by workload."""
    return "\n\n".join(map(_ladder, newest(StepEntry)))


def ops() -> str:
    """The newest timings of each device's ops, provider by provider."""
    return "\n\n".join(map(_ops, newest(OpEntry)))


def _ladder(records: Sequence[Record]) -> str:
    steps = [step for record in records for step in record.of(StepEntry) if step.cannot is None]
    steps = _by_size(steps)
    measured = step_columns(steps)
    columns: list[Column[StepEntry]] = [
        ("workload", lambda step: step.workload),
        ("precision", lambda step: step.precision),
        *measured[:7],
        measured[-1],
    ]
    return "\n".join([markdown_table(table_of(columns, steps)), "", *_sources(records)])


def _by_size(steps: Sequence[StepEntry]) -> list[StepEntry]:
    """Workloads from short to long steps, precisions from long to short ones."""
    least: dict[str, float] = {}
    of_group: dict[tuple[str, ...], float] = {}
    for step in (step for step in steps if step.role == "tier"):
        least[step.workload] = min(step.time, least.get(step.workload, step.time))
        of_group[step.group] = min(step.time, of_group.get(step.group, step.time))
    return sorted(steps, key=lambda s: (least.get(s.workload, 0.0), -of_group.get(s.group, 0.0)))


def _ops(records: Sequence[Record]) -> str:
    """A row for each op, case and dtype, a column for each provider: forward + backward on the
    device, microseconds and the share of the roofline of the same run."""
    entries = [entry for record in records for entry in last_passes(record) if entry.ran]
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for entry in entries:
        share = f" ({entry.roofline_share:.0%})" if entry.roofline_share else ""
        cells.setdefault(entry.call[:3], {})[entry.provider] = f"{entry.time * 1e6:.1f}{share}"
    baseline = next((entry.baseline for entry in entries if entry.baseline), None)
    names = dict.fromkeys(entry.provider for entry in entries)
    providers = sorted(names, key=lambda name: name != baseline)
    rows = [["op", "case", "dtype", *providers]]
    rows += [[*call, *(row.get(name, "") for name in providers)] for call, row in cells.items()]
    return "\n".join([markdown_table(rows), "", *_sources(records)])


def _sources(records: Sequence[Record]) -> list[str]:
    """The sources of records, each with the groups that it is the source of."""
    groups: dict[str, list[str]] = {}
    for record in records:
        groups.setdefault(source(record), []).append(record.group)
    return [
        escaped(f"{', '.join(names)}: measured on {text}.") + "\n" for text, names in groups.items()
    ]


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


def _tables(sources: Iterable[tuple[Record, Sequence[Sequence[str]]]]) -> str:
    """The rows of each record as a table, and their source below it."""
    tables = [f"{markdown_table(rows)}\n\n{source(record)}." for record, rows in sources]
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
    return _bars(StepEntry, row_for_each_call=False)


def op_bars() -> str:
    """The bars of single ops: a row for each case and bar, a column for each device."""
    return _bars(OpEntry, row_for_each_call=True)


def _bars(kind: type[Timed], row_for_each_call: bool) -> str:
    """Whether each bar holds. One about a contender without an entry has no cell, and one about a
    field that is newer than the record is not measured: nothing is known of them yet."""
    bars = [
        (call, target, target.measured(entries), record)
        for record in (record for records in newest(kind) for record in records)
        for target, call, entries in covered(TARGETS, record.of(kind))
        if (entry := entries.get(target.who)) and entry.ran and target.concerns(record.device)
    ]
    if not bars:
        return "Nothing is recorded yet."
    met = [target.met(ratio) for _, target, ratio, _ in bars if ratio is not None]
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for call, target, ratio, record in bars:
        cell = "not measured"
        if ratio is not None:
            cell = shown(ratio, target.bound) + ("" if target.met(ratio) else " **missed**")
        row = (", ".join(call), str(target)) if row_for_each_call else (str(target),)
        column = record.device if row_for_each_call else f"{'-'.join(call)}, {record.device}"
        rows.setdefault(row, {})[column] = cell
    table = _grid(["of", "bar"] if row_for_each_call else ["bar"], rows)
    sources = dict.fromkeys(
        f"{record.group}: {record.device}, commit {record.short_commit}, {record.day}"
        for *_, record in bars
    )
    unknown = f" {len(bars) - len(met)} are not measured yet." if len(met) < len(bars) else ""
    text = f"{sum(met)} of {len(met)} hold.{unknown}\n\n{markdown_table(table)}"
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
