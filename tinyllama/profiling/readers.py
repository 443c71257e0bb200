"""What a profile says of a program's kernels, in whole nanoseconds, and its readers: files of
rocprofv3, rocprof and Nsight Compute (CSV), rocpd databases, traces of PyTorch, and the folders
that ``tinyllama profile`` writes. `read` takes any of them.

Every number passes `number`. Nothing here needs torch.
"""

import contextlib
import csv
import gzip
import io
import json
import sqlite3
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from tinyllama.harness.machine.errors import UsageError
from tinyllama.profiling.command_lines import NSIGHT

KERNELS = "kernels.json"  # in a folder of `tinyllama profile`
MOST_BYTES = 256 * 2**20  # of a file, unpacked: to read it takes ten times as much memory
LARGEST = 2**63  # nanoseconds; no clock has counted 292 years


class ProfileError(UsageError):
    """A profile that cannot be read; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class Total:
    """All launches of one kernel."""

    name: str
    calls: int
    nanoseconds: int


@dataclass(frozen=True)
class Counter:
    """A hardware counter of one kernel: its sum over the launches, or of a share in % the mean."""

    kernel: str
    counter: str
    value: float
    unit: str = ""


@dataclass(frozen=True)
class Profile:
    """The kernels of one profiled program, the slowest first. Those that overlap count twice."""

    totals: tuple[Total, ...]
    counters: tuple[Counter, ...] = ()

    @classmethod
    def of(cls, totals: Iterable[Total], counters: Iterable[Counter] = ()) -> "Profile":
        """Make a profile from totals, of which several may have one name."""
        by_name: dict[str, Total] = {}
        for total in totals:
            before = by_name.get(total.name, Total(total.name, 0, 0))
            by_name[total.name] = Total(
                total.name, before.calls + total.calls, before.nanoseconds + total.nanoseconds
            )
        slowest = sorted(by_name.values(), key=lambda total: (-total.nanoseconds, total.name))
        return cls(tuple(slowest), tuple(counters))

    @property
    def summary(self) -> str:
        microseconds = sum(total.nanoseconds for total in self.totals) / 1e3
        return f"{sum(total.calls for total in self.totals)} launches in {microseconds:.1f} us"


def read(path: Path) -> Profile:
    """A profile of any tool: a folder that one of them wrote, or one of its files. Raises
    ProfileError, whose message never holds the file."""
    if path.is_dir():
        files = (path / name for name in (NSIGHT, KERNELS))
        single = next((file for file in files if file.is_file()), None)
        return of_amd_folder(path) if single is None else read(single)
    if not path.is_file():
        why = "is a pipe or a device" if path.exists() else "does not exist"
        raise ProfileError(f"{path} {why}: name a folder of profile, or a file of a tool")
    by_suffix = {".db": of_database, ".csv": of_csv, ".json": of_trace, ".gz": of_trace}
    reader = of_step if path.name == KERNELS else by_suffix.get(path.suffix)
    if reader is None:
        raise ProfileError(f"{path} is of no known tool: its name ends with .csv, .db or .json")
    wrong = (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
    try:
        return reader(path)
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}: profile again, or name another file") from None
    except (*wrong, csv.Error, sqlite3.Error) as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise ProfileError(f"{path} is no profile that can be read ({reason})") from None


# -- one door; errors need not name the file: `read` does -----------------------------------------


def number(value: object, what: str) -> Decimal:
    """Take a number from a profile, exactly: nanoseconds since 1970 need more than a float has.

    what: the place in the file, for the message. Raises ProfileError for anything but a number
    from 0 to `LARGEST`.
    """
    exact = Decimal("NaN")
    if isinstance(value, (str, int, float, Decimal)) and not isinstance(value, bool):
        with contextlib.suppress(InvalidOperation, ValueError):
            exact = Decimal(value)
    if not exact.is_finite() or not 0 <= exact < LARGEST:
        raise ProfileError(f"{what:.200} is {repr(value)[:40]}, no number from 0 to 2^63")
    return exact


def launch(name: object, start: Decimal, end: Decimal) -> Total:
    """One launch, by its times in nanoseconds. Raises ProfileError."""
    if not isinstance(name, str) or end < start:
        fault = "ends before it starts" if isinstance(name, str) else "has no name"
        raise ProfileError(f"a launch at {start} {fault}")
    return Total(name, 1, round(end - start))


def content(path: Path) -> bytes:
    """The bytes of a file, unpacked. Raises ProfileError for more than `MOST_BYTES`."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ProfileError(f"more than {MOST_BYTES >> 20} MiB unpacked, of too many steps")
    return data


# -- CSV of AMD's profilers and of Nsight Compute -------------------------------------------------

# By what a row has: the names that its column has had. Columns are found by name, whatever their
# case and order: ROCm 7.0 adds some, rocpd2csv puts Guid first, ROCm 5 spells BeginNs and EndNs.
SPELLINGS = {
    "kernel": ("kernel_name", "kernelname", "name", "kernel name"),
    "start": ("start_timestamp", "beginns"),
    "end": ("end_timestamp", "endns"),
    "calls": ("calls",),
    "total": ("totaldurationns",),
    "counter": ("counter_name", "metric name"),
    "value": ("counter_value", "metric value"),
    "unit": ("metric unit",),
}
DURATION = "gpu__time_duration.sum"  # the metric of Nsight Compute that is a time
NANOSECONDS = {"nsecond": 1, "ns": 1, "usecond": 1000, "us": 1000, "msecond": 10**6, "ms": 10**6}
NANOSECONDS |= {"second": 10**9, "s": 10**9}


def of_csv(path: Path) -> Profile:
    """The profile in a CSV file: counters, a trace or statistics. Raises ProfileError for one that
    is truncated, or of another program."""
    lines = _table(content(path).decode("utf-8-sig"))
    reader = csv.DictReader(lines, strict=True)
    names = {name.strip().lower(): name for name in reader.fieldnames or ()}
    columns = {
        key: names[spelling]
        for key, spellings in SPELLINGS.items()
        for spelling in reversed(spellings)
        if spelling in names
    }
    # A file of counters has times, too.
    kinds = {"counter": of_counters, "start": of_launches, "calls": of_statistics}
    kind = next((key for key in kinds if {key, "kernel"} <= columns.keys()), None)
    if kind is None:
        notice = next((line for line in lines if line.startswith("==ERROR==")), "")[:200]
        raise ProfileError(f"no columns of a trace, of counters or of statistics {notice}".strip())
    rows = []
    for row in reader:
        if None in row or None in row.values():
            text = f"line {reader.line_num} has not the {len(names)} columns of the heading"
            raise ProfileError(f"{text}, so the file is truncated")
        rows.append({key: row[name] for key, name in columns.items()})
    return kinds[kind](rows)


def _table(text: str) -> list[str]:
    """The lines of a CSV file; of Nsight Compute's, those without its notices."""
    lines = list(io.StringIO(text, newline=""))
    heading = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), None)
    return lines if heading is None else [line for line in lines[heading:] if line[:1] == '"']


def cell(row: dict[str, str], key: str) -> Decimal:
    return number(row[key], f"{key} of {row['kernel']!r}")


def of_launches(rows: Iterable[dict[str, str]]) -> Profile:
    return Profile.of(launch(row["kernel"], cell(row, "start"), cell(row, "end")) for row in rows)


def of_statistics(rows: Iterable[dict[str, str]]) -> Profile:
    return Profile.of(
        Total(row["kernel"], round(cell(row, "calls")), round(cell(row, "total"))) for row in rows
    )


def of_counters(rows: Iterable[dict[str, str]]) -> Profile:
    """The sums of counters over launches, the means of shares in %, and the times among them."""
    totals: list[Total] = []
    values: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for row in rows:
        kernel, counter, unit = row["kernel"], row["counter"], row.get("unit", "")
        text = row["value"].replace(",", "") if unit else row["value"]  # of thousands
        value = number(text, f"{counter} of {kernel!r}")
        if counter != DURATION:
            values[kernel, counter, unit].append(float(value))
        elif unit in NANOSECONDS:
            totals.append(Total(kernel, 1, round(value * NANOSECONDS[unit])))
        else:
            raise ProfileError(f"{counter} is in {unit!r:.40}, not in {', '.join(NANOSECONDS)}")
    counters = (
        Counter(kernel, counter, sum(series) / (len(series) if unit == "%" else 1), unit)
        for (kernel, counter, unit), series in values.items()
    )
    return Profile.of(totals, counters)


# -- rocpd databases, and folders of AMD's profilers ----------------------------------------------


def of_database(path: Path) -> Profile:
    """The launches and counters in a rocpd database, from its views. Raises ProfileError."""
    with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as db:

        def columns(view: str) -> set[str]:
            return {name for _, name, *_ in db.execute(f"PRAGMA table_info({view})")}

        if not {"name", "start", "end"} <= columns("kernels"):
            raise ProfileError("no rocpd database, which has a view kernels")
        totals = []
        for name, *times in db.execute('SELECT name, start, "end" FROM kernels'):
            start, end = (number(time, f"a time of {name!r}") for time in times)
            totals.append(launch(name, start, end))
        counters = []
        there = columns("counters_collection")
        kernel = "kernel_name" if "kernel_name" in there else "name"
        if {kernel, "counter_name", "value"} <= there:
            sums = db.execute(
                f"SELECT {kernel}, counter_name, SUM(value) FROM counters_collection "
                f"GROUP BY {kernel}, counter_name"
            )
            for name, counter, value in sums:
                exact = number(value, f"{counter!r} of {name!r}")
                counters.append(Counter(str(name), str(counter), float(exact)))
    return Profile.of(totals, counters)


# The files of a folder, the best first: what rocprofv3 writes, and rocprof (*.stats.csv, and
# results.csv, which has times where that was asked for; its results.db is no rocpd database).
FILES = (("*kernel_trace.csv",), ("*kernel_stats.csv", "*.stats.csv"), ("results.csv",), ("*.db",))


def of_amd_folder(folder: Path) -> Profile:
    """All that AMD's profilers wrote below a folder: one set of files for each process.

    A trace is preferred to statistics, which say the same, and both to a database. An empty domain
    writes no file, so a folder without any kernel is refused. Raises ProfileError.
    """

    def read_all(*patterns: str) -> Profile:
        paths = sorted({path for pattern in patterns for path in folder.rglob(pattern)})
        profiles = [read(path) for path in paths]
        totals = (total for profile in profiles for total in profile.totals)
        return Profile.of(totals, (c for profile in profiles for c in profile.counters))

    counters = read_all("*counter_collection.csv").counters
    for patterns in FILES:
        profile = read_all(*patterns)
        if profile.totals:
            return Profile(profile.totals, (*profile.counters, *counters))
    if not counters:
        raise ProfileError(f"{folder} has no kernel in a file of a profiler: profile again")
    return Profile((), counters)


# -- PyTorch's traces, in Chrome's format, and folders of `tinyllama profile` ---------------------

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
ON_HOST = "cpu_op"


def of_trace(path: Path) -> Profile:
    """The kernels of a trace; of a machine without a GPU its outermost operators. Raises
    ProfileError."""
    events = json.loads(content(path), parse_float=Decimal)["traceEvents"]
    complete = [event for event in events if event.get("ph") == "X"]
    kernels = [event for event in complete if event.get("cat") in ON_DEVICE]
    if not kernels:
        operators = (event for event in complete if event.get("cat") == ON_HOST)
        kernels = _outermost(operators)
    totals = []
    for event in kernels:
        start, end = _microseconds(event)
        totals.append(launch(event["name"], 1000 * start, 1000 * end))
    if not totals:
        raise ProfileError("it has no kernel and no operator")
    return Profile.of(totals)


def _microseconds(event: dict[str, Any]) -> tuple[Decimal, Decimal]:
    """Start and end of an event."""
    what = f"of {event.get('name')!r}"
    start = number(event.get("ts"), f"ts {what}")
    return start, start + number(event.get("dur", 0), f"dur {what}")


def _outermost(operators: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The operators that no other operator of their thread called."""
    timed = [(*_microseconds(operator), operator) for operator in operators]
    ends: dict[Any, Decimal] = {}  # by thread
    outermost = []
    for start, end, operator in sorted(timed, key=lambda entry: (entry[0], -entry[1])):
        if start >= ends.get(operator["tid"], 0):
            outermost.append(operator)
            ends[operator["tid"]] = end
    return outermost


def of_step(path: Path) -> Profile:
    """The kernels in a `KERNELS` of ``tinyllama profile``. Raises ProfileError."""
    totals = []
    for work in json.loads(content(path), parse_float=Decimal)["work"]:
        seconds = number(work["seconds"], f"seconds of {work['name']!r}")
        totals.append(Total(str(work["name"]), 1, round(seconds * 10**9)))
    return Profile.of(totals)
