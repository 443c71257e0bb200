"""Files of AMD's rocprofv3: CSV (ROCm 6.2 on) and rocpd databases (7.0 on).

Columns are found by name, whatever their case and order: they differ between versions (ROCm 6.2
has no Thread_Id, 7.0 adds Stream_Id and the registers, rocpd2csv puts Guid first). A column that a
version lacks is left out; a file without the columns that count is refused.
"""

import contextlib
import csv
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tinyllama.profiling.kernels import (
    Counter,
    Dispatch,
    Profile,
    ProfileError,
    Total,
    of_dispatches,
    summed,
)

TRACE = ("kernel_name", "start_timestamp", "end_timestamp")
STATS = ("name", "calls", "totaldurationns")
COUNTERS = ("kernel_name", "counter_name", "counter_value")
Row = Mapping[str, str]


def rows(path: Path, needed: tuple[str, ...]) -> Iterator[Row]:
    """The rows of a CSV file by column, in lower case. Raises ProfileError for a file that is
    truncated, or is not what it is read as."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = [name.strip().lower() for name in next(reader, [])]
            lacking = [name for name in needed if name not in header]
            if lacking:
                raise ProfileError(
                    f"{path}: no column {', '.join(lacking)}: name a file that rocprofv3 wrote"
                )
            for cells in reader:
                if len(cells) != len(header):
                    raise ProfileError(
                        f"{path}, line {reader.line_num}: {len(cells)} of {len(header)} columns: "
                        "the file is truncated; profile again"
                    )
                yield dict(zip(header, cells, strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ProfileError(f"{path} cannot be read: {error}") from error


def number(path: Path, row: Row, column: str) -> float:
    """A cell as a number. Raises ProfileError for any other text."""
    try:
        return float(row[column])
    except ValueError:
        raise ProfileError(
            f"{path}: {column} is {row[column]!r}, no number: the file is damaged; profile again"
        ) from None


def trace(path: Path) -> list[Dispatch]:
    """The launches in a ``*_kernel_trace.csv``."""
    found = []
    for row in rows(path, TRACE):
        stream = row.get("stream_id") or row.get("queue_id") or "0"
        found.append(
            Dispatch(
                row["kernel_name"],
                int(number(path, row, "start_timestamp")),
                int(number(path, row, "end_timestamp")),
                int(stream) if stream.isdigit() else 0,
            )
        )
    return found


def stats(path: Path) -> list[Total]:
    """The kernels in a ``*_kernel_stats.csv``; the numbers may have exponents."""
    return [
        Total(
            row["name"],
            int(number(path, row, "calls")),
            number(path, row, "totaldurationns") * 1e-9,
        )
        for row in rows(path, STATS)
    ]


def counters(path: Path) -> list[Counter]:
    """The counters in a ``*_counter_collection.csv``: a row a launch and counter."""
    total: dict[tuple[str, str], float] = {}
    for row in rows(path, COUNTERS):
        key = row["kernel_name"], row["counter_name"]
        total[key] = total.get(key, 0.0) + number(path, row, "counter_value")
    return [Counter(kernel, name, value) for (kernel, name), value in total.items()]


def database(path: Path) -> Profile:
    """The launches and counters in a rocpd database, from its views."""
    try:
        with contextlib.closing(
            sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        ) as db:
            columns = {name for _, name, *_ in db.execute("PRAGMA table_info(kernels)")}
            if not {"name", "start", "end"} <= columns:
                raise ProfileError(f"{path} has no view kernels: name a rocpd database")
            stream = next((name for name in ("stream_id", "queue_id") if name in columns), "0")
            launches = [
                Dispatch(str(name), int(start), int(end), int(on or 0))
                for name, start, end, on in db.execute(
                    f'SELECT name, start, "end", {stream} FROM kernels'
                )
            ]
            known = {name for _, name, *_ in db.execute("PRAGMA table_info(counters_collection)")}
            kernel = "kernel_name" if "kernel_name" in known else "name"
            found = []
            if {kernel, "counter_name", "value"} <= known:
                found = [
                    Counter(str(one), str(counter), float(value))
                    for one, counter, value in db.execute(
                        f"SELECT {kernel}, counter_name, SUM(value) FROM counters_collection "
                        f"GROUP BY {kernel}, counter_name"
                    )
                ]
    except (sqlite3.Error, ValueError, TypeError) as error:
        raise ProfileError(
            f"{path} cannot be read as a rocpd database: {error}; profile again"
        ) from error
    return of_dispatches(launches, counters=tuple(found), sources=(str(path),))


def read(folder: Path) -> Profile:
    """All that rocprofv3 wrote below a folder: one set of files for each process.

    A kernel trace is preferred to its statistics, which say the same. An empty domain writes no
    file, so a folder without any kernel is refused. Raises ProfileError.
    """
    launches: list[Dispatch] = []
    found: list[Counter] = []
    totals: list[Total] = []
    sources: list[str] = []

    def each(pattern: str, take: Callable[[Path], None]) -> None:
        for path in sorted(folder.rglob(pattern)):
            take(path)
            sources.append(str(path))

    def take_database(path: Path) -> None:
        one = database(path)
        launches.extend(one.dispatches)
        found.extend(one.counters)

    each("*kernel_trace.csv", lambda path: launches.extend(trace(path)))
    each("*counter_collection.csv", lambda path: found.extend(counters(path)))
    if not launches:
        each("*.db", take_database)
    if not launches:
        each("*kernel_stats.csv", lambda path: totals.extend(stats(path)))
    if not (launches or totals or found):
        raise ProfileError(f"{folder} has no kernel in a file of rocprofv3: profile again")
    if launches:
        return of_dispatches(launches, counters=tuple(found), sources=tuple(sources))
    return Profile(summed(totals), counters=tuple(found), sources=tuple(sources))
