"""The published performance study: time and memory over lengths and batches, from the sweeps that
``pytest perf_tests`` recorded."""

from collections.abc import Sequence
from pathlib import Path

from tinyllama.bench.sweeps import SWEEPS
from tinyllama.bench.workloads import not_here
from tinyllama.harness.machine.device import default_device
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.records.entries import SweepEntry
from tinyllama.harness.records.results import Record, records
from tinyllama.harness.report.tables import latest
from tinyllama.harness.report.terminal import console
from tinyllama.profiling.tables import columns


def command() -> list[str]:
    """What measures the sweeps of the device at hand."""
    device = default_device()
    here = [str(sweep) for sweep in SWEEPS if not_here(sweep.base, device) is None]
    return ["pytest", "perf_tests", "--record", "--groups", ",".join(here)]


def recorded(root: Path) -> list[Record]:
    """The newest record of each sweep of each device. Raises UsageError where there is none."""
    try:
        stored = [record for _, record in records(root)] if root.is_dir() else []
    except (OSError, ValueError) as error:
        raise UsageError(f"{error}: repair or remove that file") from error
    sweeps = [record for record in latest(stored) if record.of(SweepEntry)]
    if not sweeps:
        raise UsageError(f"no sweep is recorded in {root}: run {' '.join(command())}")
    return sweeps


def show(sweeps: Sequence[Record]) -> None:
    """Print the table of each sweep: a row for each tier at each size."""
    out = console()
    for record in sweeps:
        entries = record.of(SweepEntry)
        table = columns(
            "batch x length", "tier", "ms", "samples/s", "over the first", "peak MiB", left=2
        )
        first: dict[tuple[int, int], float] = {}
        for entry in entries:
            size = entry.batch_size, entry.seq_len
            if not entry.ran:
                table.add_row(f"{size[0]} x {size[1]}", entry.contender, "-", "-", "-", "-")
                continue
            over = first.setdefault(size, entry.time) / entry.time
            peak = "-" if entry.peak_bytes is None else f"{entry.peak_bytes / 2**20:,.0f}"
            rate = f"{entry.samples_per_second or 0:,.0f}"
            figures = f"{entry.time * 1e3:.3g}", rate, f"{over:.2f}x", peak
            table.add_row(f"{size[0]} x {size[1]}", entry.contender, *figures)
        source = f"{record.device}, commit {record.short_commit}, {record.date[:10]}"
        out.print(f"{record.group}: {source}")
        out.print(table)
        for reason in dict.fromkeys(f"{e.contender}: {e.cannot}" for e in entries if e.cannot):
            out.print(reason)
