"""Files of profilers: rocprofv3 and rocprof (CSV), rocpd databases, traces of PyTorch, and the
folders that ``tinyllama profile`` writes. Every number passes `number`.

Columns of a CSV file are found by name, whatever their case and order, because they differ between
versions: ROCm 6.2 has no Thread_Id, 7.0 adds Stream_Id and the registers, rocpd2csv puts Guid
first, and rocprof of ROCm 5 spells KernelName, BeginNs and EndNs.
"""

import contextlib
import csv
import gzip
import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from tinyllama.profiling.profiles import (
    Counter,
    Dispatch,
    Profile,
    ProfileError,
    Total,
    of_dispatches,
    summed,
)

KERNELS = "kernels.json"  # in a folder of `tinyllama profile`
MOST_BYTES = 256 * 2**20  # of a trace, unpacked: to read it takes ten times as much memory
LARGEST = 2**63  # nanoseconds; no clock has counted 292 years
LONGEST = 200  # characters of a file's content in a message

# -- one door -------------------------------------------------------------------------------------


def number(value: object, what: str) -> Decimal:
    """Take a number from a profile, exactly: nanoseconds since 1970 need more than a float has.

    what: the file and the place, for the message. Raises ProfileError for anything but a number
    from 0 to `LARGEST`.
    """
    exact = Decimal("NaN")
    if isinstance(value, (str, int, float, Decimal)) and not isinstance(value, bool):
        with contextlib.suppress(InvalidOperation, ValueError):
            exact = Decimal(value)
    if not exact.is_finite() or not 0 <= exact < LARGEST:
        raise ProfileError(f"{what} is {repr(value)[:40]}, no number from 0 to 2^63: profile again")
    return exact


def launch(name: object, start: Decimal, duration: Decimal, path: Path) -> Dispatch:
    """Make a launch of a trace from its times in nanoseconds. Raises ProfileError."""
    if not isinstance(name, str) or duration < 0:
        fault = "ends before it starts" if isinstance(name, str) else "has no name"
        raise ProfileError(f"{path}: a launch at {start} {fault}: profile again")
    return Dispatch(name, round(start), round(start) + round(duration))


@contextlib.contextmanager
def readable(path: Path, kind: str) -> Iterator[None]:
    """Turn whatever is wrong with a file into a ProfileError, which never holds the file."""
    wrong = (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError)
    try:
        yield
    except ProfileError:
        raise
    except (*wrong, RecursionError, csv.Error, sqlite3.Error) as error:
        reason = f"{type(error).__name__}: {str(error)[:LONGEST]}"
        raise ProfileError(f"{path} cannot be read as {kind} ({reason}): profile again") from None


def content(path: Path) -> bytes:
    """The bytes of a file, unpacked. Raises ProfileError for more than `MOST_BYTES`."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        size = f"{MOST_BYTES >> 20} MiB unpacked"
        raise ProfileError(f"{path} has more than {size}: profile fewer steps")
    return data


# -- AMD's profilers ------------------------------------------------------------------------------

# By what a row has: the names that its column has had, the newest first.
SPELLINGS = {
    "kernel": ("kernel_name", "kernelname", "name"),
    "start": ("start_timestamp", "beginns"),
    "end": ("end_timestamp", "endns"),
    "calls": ("calls",),
    "total": ("totaldurationns",),
    "counter": ("counter_name",),
    "value": ("counter_value",),
}
COUNTERS = {"kernel", "counter", "value"}  # such a file has times, too
TRACE = {"kernel", "start", "end"}
STATISTICS = {"kernel", "calls", "total"}
# The files of a folder, the best first: what rocprofv3 writes, and rocprof (*.stats.csv, and
# results.csv, which has times where that was asked for; its results.db is no rocpd database).
FILES = (("*kernel_trace.csv",), ("*kernel_stats.csv", "*.stats.csv"), ("results.csv",), ("*.db",))


def rows(path: Path) -> tuple[set[str], list[dict[str, str]]]:
    """The rows of a CSV file, by the keys of `SPELLINGS`, and which of its kinds it is. Raises
    ProfileError for one that is truncated, or of another program."""
    with readable(path, "a file of rocprofv3"), path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        header = [name.strip().lower() for name in next(reader, [])]
        places = {
            key: header.index(name)
            for key, names in SPELLINGS.items()
            if (name := next((name for name in names if name in header), None)) is not None
        }
        kinds = (kind for kind in (COUNTERS, TRACE, STATISTICS) if places.keys() >= kind)
        if (kind := next(kinds, None)) is None:
            what = "a kernel trace, of counters or of statistics"
            raise ProfileError(f"{path}: no columns of {what}: name a file that rocprofv3 wrote")
        cells_of_rows = list(reader)
        for line, cells in enumerate(cells_of_rows, 2):
            if len(cells) != len(header):
                raise ProfileError(
                    f"{path}, line {line}: {len(cells)} of {len(header)} columns: the file is "
                    "truncated; profile again"
                )
    return kind, [{key: cells[n] for key, n in places.items()} for cells in cells_of_rows]


def of_csv(path: Path) -> Profile:
    """The profile in a CSV file of rocprofv3 or rocprof. Raises ProfileError."""
    kind, table = rows(path)

    def cell(row: dict[str, str], key: str) -> Decimal:
        return number(row[key], f"{path}: {key} of {row['kernel'][:LONGEST]!r}")

    if kind == TRACE:
        times = ((row["kernel"], cell(row, "start"), cell(row, "end")) for row in table)
        return of_dispatches(launch(name, start, end - start, path) for name, start, end in times)
    if kind == STATISTICS:
        return Profile(
            summed(
                Total(row["kernel"], round(cell(row, "calls")), round(cell(row, "total")))
                for row in table
            )
        )
    values: dict[tuple[str, str], Decimal] = {}
    for row in table:
        key = row["kernel"], row["counter"]
        values[key] = values.get(key, Decimal(0)) + cell(row, "value")
    return Profile((), counters=tuple(Counter(*key, float(value)) for key, value in values.items()))


def of_database(path: Path) -> Profile:
    """The launches and counters in a rocpd database, from its views. Raises ProfileError."""
    with (
        readable(path, "a rocpd database"),
        contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as db,
    ):

        def columns(view: str) -> set[str]:
            return {name for _, name, *_ in db.execute(f"PRAGMA table_info({view})")}

        if not {"name", "start", "end"} <= columns("kernels"):
            raise ProfileError(f"{path} has no view kernels: name a rocpd database")
        launches = []
        for name, *times in db.execute('SELECT name, start, "end" FROM kernels'):
            start, end = (number(time, f"{path}: a time of {name!r:.80}") for time in times)
            launches.append(launch(name, start, end - start, path))
        counters = []
        there = columns("counters_collection")
        kernel = "kernel_name" if "kernel_name" in there else "name"
        if {kernel, "counter_name", "value"} <= there:
            sums = db.execute(
                f"SELECT {kernel}, counter_name, SUM(value) FROM counters_collection "
                f"GROUP BY {kernel}, counter_name"
            )
            for name, counter, value in sums:
                exact = number(value, f"{path}: {counter!r:.80} of {name!r:.80}")
                counters.append(Counter(str(name), str(counter), float(exact)))
    return of_dispatches(launches, counters)


def joined(profiles: Sequence[Profile]) -> Profile:
    """One profile of what several processes or files say."""
    launches = [launch for profile in profiles for launch in profile.dispatches]
    counters = [counter for profile in profiles for counter in profile.counters]
    if launches:
        return of_dispatches(launches, counters)
    totals = summed(total for profile in profiles for total in profile.totals)
    return Profile(totals, counters=tuple(counters))


def of_amd_folder(folder: Path) -> Profile:
    """All that AMD's profilers wrote below a folder: one set of files for each process.

    A trace is preferred to statistics, which say the same, and both to a database. An empty domain
    writes no file, so a folder without any kernel is refused. Raises ProfileError.
    """

    def read_all(*patterns: str) -> list[Profile]:
        paths = sorted({path for pattern in patterns for path in folder.rglob(pattern)})
        return [of_database(path) if path.suffix == ".db" else of_csv(path) for path in paths]

    counters = read_all("*counter_collection.csv")
    for patterns in FILES:
        profile = joined([*read_all(*patterns), *counters])
        if profile.totals:
            return profile
    if not counters:
        raise ProfileError(f"{folder} has no kernel in a file of a profiler: profile again")
    return joined(counters)


# -- PyTorch's traces, in Chrome's format, and folders of `tinyllama profile` ---------------------

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
ON_HOST = "cpu_op"
Timed = tuple[Decimal, Decimal, dict[str, Any]]  # start and duration in microseconds, the event


def of_trace(path: Path) -> Profile:
    """The kernels of a trace; of a machine without a GPU its outermost operators. Raises
    ProfileError."""
    with readable(path, "a trace of PyTorch's profiler"):
        events = json.loads(content(path), parse_float=Decimal)["traceEvents"]
        complete = [event for event in events if event.get("ph") == "X"]
        kernels = [event for event in complete if event.get("cat") in ON_DEVICE]
        operators = [event for event in complete if event.get("cat") == ON_HOST]
        timed = [_timed(event, path) for event in kernels or operators]
        chosen = timed if kernels else _outermost(timed)
        launches = [launch(e["name"], 1000 * at, 1000 * took, path) for at, took, e in chosen]
    if not launches:
        raise ProfileError(f"{path} has no kernel and no operator: profile a step")
    return of_dispatches(launches)


def _timed(event: dict[str, Any], path: Path) -> Timed:
    what = f"of {event.get('name')!r:.80}"
    start = number(event.get("ts"), f"{path}: ts {what}")
    return start, number(event.get("dur", 0), f"{path}: dur {what}"), event


def _outermost(timed: Iterable[Timed]) -> Iterator[Timed]:
    """The operators that no other operator of their thread called."""
    ends: dict[Any, Decimal] = {}  # by thread
    for start, duration, event in sorted(timed, key=lambda entry: (entry[0], -entry[1])):
        if start >= ends.get(event["tid"], 0):
            yield start, duration, event
            ends[event["tid"]] = start + duration


def of_step(path: Path) -> Profile:
    """The kernels in a `KERNELS` of ``tinyllama profile``. Raises ProfileError."""
    with readable(path, "a profile of tinyllama"):
        totals = []
        for work in json.loads(content(path), parse_float=Decimal)["work"]:
            seconds = number(work["seconds"], f"{path}: seconds of {work['name']!r:.80}")
            totals.append(Total(str(work["name"]), 1, round(seconds * 10**9)))
    return Profile(summed(totals))
