"""Files of profilers: every version is read alike, and what is no such file is one clear error."""

import gzip
import json
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from correctness_tests.support import profiler_files
from correctness_tests.support.commands import printed, refused
from correctness_tests.support.profiler_files import NSIGHT_HEAD, WARPS
from tinyllama.profiling import readers
from tinyllama.profiling.command_lines import METRICS, NSIGHT
from tinyllama.profiling.readers import Profile, ProfileError, read

EPOCH_US = 1_764_400_000_000_000  # microseconds of 2025: a float of its nanoseconds is 256 ns wide


def check_figures(profile: Profile) -> None:
    """Compare with the figures of `profiler_files.LAUNCHES`, by hand."""
    assert {total.name: (total.calls, total.nanoseconds) for total in profile.totals} == {
        profiler_files.LAUNCHES[0][0]: (1, 3000),
        "rms_norm_forward": (2, 3000),
    }


FILES: dict[str, Any] = {
    "host/17_kernel_trace.csv": profiler_files.trace,
    "rocpd2csv/a_kernel_trace.csv": lambda path: profiler_files.trace(path, "Guid"),
    "a_kernel_stats.csv": profiler_files.stats,
    "results.stats.csv": profiler_files.stats,  # of rocprof, as the next
    "results.csv": profiler_files.old_trace,
    "a_results.db": profiler_files.database,
    NSIGHT: lambda path: profiler_files.nsight(path, METRICS),
}


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte order mark"])
@pytest.mark.parametrize("name", FILES)
def test_files_of_every_version_give_same_times(name: str, mark: bytes, tmp_path: Path) -> None:
    path = FILES[name](tmp_path / name)
    if path.suffix == ".csv":
        path.write_bytes(mark + path.read_bytes())
    (tmp_path / "results.hip_stats.csv").write_text("Name,Calls,TotalDurationNs\nhipFree,1,9\n")
    check_figures(read(path))
    check_figures(read(tmp_path))


def test_folder_prefers_trace_to_statistics(tmp_path: Path) -> None:
    for name in ("a_kernel_stats.csv", "host/17_kernel_trace.csv"):
        FILES[name](tmp_path / name)
    check_figures(read(tmp_path))


COUNTERS: dict[str, Any] = {
    "pmc_1/a_counter_collection.csv": profiler_files.counters,
    "a.db": profiler_files.database,
    NSIGHT: lambda path: profiler_files.nsight(path, METRICS),
}


@pytest.mark.parametrize("name", COUNTERS)
def test_reader_sums_counters_and_averages_shares(name: str, tmp_path: Path) -> None:
    path = COUNTERS[name](tmp_path / name)
    expected = {"SQ_WAVES": (32.0, "")}
    if name == NSIGHT:
        expected = {"dram__bytes.sum": (8192.0, "byte"), WARPS: (75.0, "%")}
    for profile in (read(path), read(tmp_path)):
        norm = [c for c in profile.counters if c.kernel == "rms_norm_forward"]
        assert {c.counter: (c.value, c.unit) for c in norm} == expected


def chrome(path: Path, *events: tuple[str, str, Any, Any], **fields: Any) -> Path:
    """A trace in Chrome's format, of events by category, name, start and duration."""
    keys = ("cat", "name", "ts", "dur")
    named = [{**dict(zip(keys, e, strict=True)), "ph": "X", "tid": 1, **fields} for e in events]
    data = json.dumps({"traceEvents": named}).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_times_since_1970_keep_nanoseconds(name: str, tmp_path: Path) -> None:
    starts = (EPOCH_US + 0.25, EPOCH_US + 2000)
    events = [("kernel", "gemm", start, 1.2) for start in starts]
    trace = chrome(tmp_path / name, ("cpu_op", "aten::mm", EPOCH_US, 9000), *events)
    (gemm,) = read(trace).totals
    assert (gemm.name, gemm.calls, gemm.nanoseconds) == ("gemm", 2, 2400)
    path = tmp_path / "a_kernel_trace.csv"
    first = EPOCH_US * 1000 + 101
    path.write_text(f"Kernel_Name,Start_Timestamp,End_Timestamp\ngemm,{first},{first + 1200}\n")
    assert [total.nanoseconds for total in read(path).totals] == [1200]


def test_trace_without_kernels_gives_outermost_operators(tmp_path: Path) -> None:
    operators = (("cpu_op", "outer", 0, 10), ("cpu_op", "inner", 2, 3), ("cpu_op", "next", 10, 4))
    profile = read(chrome(tmp_path / "trace.json", *operators))
    assert {t.name: t.nanoseconds for t in profile.totals} == {"outer": 10_000, "next": 4000}


NUMBERS = ["-5", "1e999", "nan", "null", "[1]", '"many"', "1" + "0" * 5000, "true"]
TRACE_CSV = "Kernel_Name,Start_Timestamp,End_Timestamp\n"
ROW = '"0","7","gemm","gpu__time_duration.sum","nsecond"'
EVENT = '{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a", %s}]}'
WITH_NUMBER = {
    "trace.json": EVENT % '"ts": 1, "dur": %s',
    "kernels.json": '{"work": [{"name": "a", "seconds": %s, "op": "b"}]}',
    "a_kernel_trace.csv": TRACE_CSV + "a,10,%s\n",
    "a_kernel_stats.csv": "Name,Calls,TotalDurationNs\na,%s,3\n",
    "a_counter_collection.csv": "Kernel_Name,Counter_Name,Counter_Value\na,b,%s\n",
    NSIGHT: f"{NSIGHT_HEAD}\n{ROW},%s\n",
}


@pytest.mark.parametrize("value", NUMBERS, ids=lambda value: value[:6])
@pytest.mark.parametrize("name", WITH_NUMBER)
def test_compare_refuses_value_that_is_no_time_or_count(
    name: str, value: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(WITH_NUMBER[name] % value)
    message = refused("profile", "compare", path, path)
    assert name in message
    assert len(message) < 600


DAMAGED: dict[str, list[bytes]] = {
    "a_kernel_trace.csv": [
        b"a,b\n1,2\n",
        b"",
        b"\xff\xfe\x00",
        TRACE_CSV.encode() + b"a,10\n",
        TRACE_CSV.encode() + b"a,10,9\n",
    ],
    "a.db": [b"not a database, but a text that is long enough" * 9],
    "kernels.json": [b"", b"[" * 10**5, b"{}", b'{"work": [{"x": 1}]}'],
    "trace.json": [
        b"{",
        b"[]",
        b"\xff" * 10**6,
        b'{"traceEvents": []}',
        b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": 3, "ts": 1}]}',
    ],
    NSIGHT: [
        f'{NSIGHT_HEAD}\n{ROW},"12'.encode(),
        f"{NSIGHT_HEAD}\n{ROW.replace('nsecond', 'cycle')},12\n".encode(),
        b'"ID","Kernel Name"\n"0","gemm"\n',
    ],
    "a.txt": [b""],
}


@pytest.mark.parametrize(
    ("name", "data"),
    [(name, data) for name, files in DAMAGED.items() for data in files],
    ids=[f"{name}-{n}" for name, files in DAMAGED.items() for n in range(len(files))],
)
def test_compare_refuses_foreign_or_damaged_file(name: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    message = refused("profile", "compare", tmp_path / name, tmp_path / name)
    assert name in message
    assert len(message) < 600


def test_error_of_nsight_compute_is_shown(tmp_path: Path) -> None:
    (tmp_path / NSIGHT).write_text("==PROF== a\n==ERROR== ERR_NVGPUCTRPERM - no permission\n")
    assert "ERR_NVGPUCTRPERM" in refused("profile", "compare", tmp_path, tmp_path)


def test_read_refuses_path_without_profile(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "other.db") as db:
        db.execute("CREATE TABLE kernels (id INTEGER)")
    db.close()
    os.mkfifo(tmp_path / "x.csv")
    (tmp_path / "empty").mkdir()
    for name, reason in (
        ("other.db", "no rocpd database"),
        ("x.csv", "is a pipe or a device"),
        ("nothing", "does not exist"),
        ("empty", "has no kernel"),
    ):
        with pytest.raises(ProfileError, match=f"{name}.*{reason}"):
            read(tmp_path / name)


def test_compare_refuses_trace_that_unpacks_to_more_than_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "MOST_BYTES", 2**20)
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(b" " * 2**21))
    assert "more than 1 MiB unpacked" in refused("profile", "compare", path, path)


def test_compare_lists_kernels_that_appear_vanish_and_move(tmp_path: Path) -> None:
    head = "Name,Calls,TotalDurationNs\n"
    files = tmp_path / "before.csv", tmp_path / "after.csv"
    files[0].write_text(f"{head}old,1,3000\nboth,1,1000\n")
    files[1].write_text(f"{head}new,1,9000\nboth,2,2000\n")
    lines = printed("profile", "compare", *files).splitlines()
    assert [line.split() for line in lines[1:4]] == [
        ["new", "appeared", "-", "1", "-", "9.0"],
        ["old", "vanished", "1", "-", "3.0", "-"],
        ["both", "moved", "1", "2", "1.0", "2.0"],
    ]
    assert lines[4] == "2 launches in 4.0 us before, 3 launches in 11.0 us after"
    assert "two profiles" in refused("profile", "compare", files[0])
