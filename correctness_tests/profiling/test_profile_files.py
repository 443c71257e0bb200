"""Files of profilers: every version is read alike, and what is no such file is one clear error."""

import gzip
import json
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from correctness_tests.support import nsight_files, rocm_files
from correctness_tests.support.commands import printed, refused
from correctness_tests.support.nsight_files import HEAD, WARPS
from tinyllama.profiling import readers
from tinyllama.profiling.command_lines import METRICS, NSIGHT
from tinyllama.profiling.profiles import Dispatch, Profile, ProfileError, compare, of_dispatches
from tinyllama.profiling.shown import read

EPOCH_US = 1_764_400_000_000_000  # microseconds of 2025: a float of its nanoseconds is 256 ns wide


def check_figures(profile: Profile) -> None:
    """Compare with the figures of `rocm_files.LAUNCHES`, by hand."""
    assert {total.name: (total.calls, total.nanoseconds) for total in profile.totals} == {
        rocm_files.LAUNCHES[0][0]: (1, 3000),
        "rms_norm_forward": (2, 3000),
    }


FILES: dict[str, Any] = {
    **{
        version: lambda folder, version=version: rocm_files.trace(
            folder / "host/17_kernel_trace.csv", version
        )
        for version in rocm_files.TRACES
    },
    "statistics": lambda folder: rocm_files.stats(folder / "a_kernel_stats.csv"),
    "rocprof": lambda folder: rocm_files.stats(folder / "results.stats.csv"),
    "rocprof with times": lambda folder: rocm_files.old_trace(folder / "results.csv"),
    "rocpd": lambda folder: rocm_files.database(folder / "a_results.db"),
    "ncu": lambda folder: nsight_files.counters(folder / NSIGHT, list(METRICS)),
}


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte order mark"])
@pytest.mark.parametrize("kind", FILES)
def test_files_of_every_version_give_the_same_times(kind: str, mark: bytes, tmp_path: Path) -> None:
    path = FILES[kind](tmp_path)
    if path.suffix == ".csv":
        path.write_bytes(mark + path.read_bytes())
    (tmp_path / "results.hip_stats.csv").write_text("Name,Calls,TotalDurationNs\nhipFree,1,9\n")
    check_figures(read(path))
    check_figures(read(tmp_path))


def test_a_trace_is_preferred_to_its_statistics(tmp_path: Path) -> None:
    for make in (FILES["statistics"], FILES["6.4"]):
        make(tmp_path)
    profile = read(tmp_path)
    check_figures(profile)
    assert (profile.busy_ns, profile.span_ns) == (6000, 8000)


@pytest.mark.parametrize("kind", ["new", "old", "rocpd", "ncu"])
def test_counters_are_summed_and_shares_averaged(kind: str, tmp_path: Path) -> None:
    if kind == "ncu":
        path = nsight_files.counters(tmp_path / NSIGHT, list(METRICS))
        expected = {"dram__bytes.sum": (8192.0, "byte"), WARPS: (75.0, "%")}
    else:
        folder = tmp_path / "pmc_1"
        path = (
            rocm_files.database(tmp_path / "a.db")
            if kind == "rocpd"
            else rocm_files.counters(folder / "a_counter_collection.csv", old=kind == "old")
        )
        expected = {"SQ_WAVES": (32.0, "")}
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
def test_times_since_1970_keep_their_nanoseconds(name: str, tmp_path: Path) -> None:
    starts = (EPOCH_US + 0.25, EPOCH_US + 2000)
    events = [("kernel", "gemm", start, 1.2) for start in starts]
    trace = chrome(tmp_path / name, ("cpu_op", "aten::mm", EPOCH_US, 9000), *events)
    (gemm,) = read(trace).totals
    assert (gemm.name, gemm.calls, gemm.nanoseconds) == ("gemm", 2, 2400)
    path = tmp_path / "a_kernel_trace.csv"
    first = EPOCH_US * 1000 + 101
    path.write_text(f"Kernel_Name,Start_Timestamp,End_Timestamp\ngemm,{first},{first + 1200}\n")
    assert read(path).nanoseconds == 1200


def test_outermost_operators_count_where_there_is_no_kernel(tmp_path: Path) -> None:
    operators = (("cpu_op", "outer", 0, 10), ("cpu_op", "inner", 2, 3), ("cpu_op", "next", 10, 4))
    profile = read(chrome(tmp_path / "trace.json", *operators))
    assert {t.name: t.nanoseconds for t in profile.totals} == {"outer": 10_000, "next": 4000}


HUGE, LONG = "1" + "0" * 400, "1" + "0" * 5000
NUMBERS = ["-5", "1e999", "nan", "inf", "null", "[1]", '"many"', HUGE, LONG, "true"]
TRACE_CSV = "Kernel_Name,Start_Timestamp,End_Timestamp\n"
ROW = '"0","7","gemm","gpu__time_duration.sum","nsecond"'
EVENT = '{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a", %s}]}'
WITH_NUMBER = {
    "trace.json": EVENT % '"ts": 1, "dur": %s',
    "x.json": EVENT % '"ts": %s, "dur": 1',
    "kernels.json": '{"work": [{"name": "a", "seconds": %s, "op": "b"}]}',
    "a_kernel_trace.csv": TRACE_CSV + "a,10,%s\n",
    "a_kernel_stats.csv": "Name,Calls,TotalDurationNs\na,%s,3\n",
    "a_counter_collection.csv": "Kernel_Name,Counter_Name,Counter_Value\na,b,%s\n",
    NSIGHT: f"{HEAD}\n{ROW},%s\n",
}


@pytest.mark.parametrize("value", NUMBERS, ids=lambda value: value[:6])
@pytest.mark.parametrize("name", WITH_NUMBER)
def test_a_value_that_is_no_time_or_count_is_one_error(
    name: str, value: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(WITH_NUMBER[name] % value)
    for place in (path,) if name in ("trace.json", "x.json") else (path, tmp_path):
        message = refused("profile", "compare", place, place)
        assert name in message
        assert len(message) < 600


TRACE_64 = "a_kernel_trace.csv"
DAMAGED: dict[str, list[tuple[bytes, str]]] = {
    TRACE_64: [
        (b"a,b\n1,2\n", "no columns of a kernel trace"),
        (b"", "no columns"),
        (b"\xff\xfe\x00", "cannot be read"),
        (TRACE_CSV.encode() + b"a,10\n", "line 2: 2 of 3 columns: the file is truncated"),
        (TRACE_CSV.encode() + b"a,10,9\n", "ends before it starts"),
    ],
    "a.db": [(b"not a database, but a text that is long enough" * 9, "rocpd database")],
    "kernels.json": [(b"", ""), (b"[" * 10**5, ""), (b"{}", ""), (b'{"work": [{"x": 1}]}', "")],
    "trace.json": [
        (b"{", ""),
        (b"[]", ""),
        (b"[" * 10**5, ""),
        (b"\xff" * 10**6, ""),
        (b'{"traceEvents": []}', "no kernel and no operator"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": 3, "ts": 1}]}', "has no name"),
    ],
    NSIGHT: [
        (b"==PROF== a\n==ERROR== ERR_NVGPUCTRPERM - no permission\n", "ERR_NVGPUCTRPERM"),
        (f'{HEAD}\n{ROW},"12'.encode(), "cannot be read"),
        (f"{HEAD}\n{ROW.replace('nsecond', 'cycle')},12\n".encode(), "is in 'cycle'"),
        (b'"ID","Kernel Name"\n"0","gemm"\n', "Metric Name"),
    ],
    "a.txt": [(b"", "ends with .csv, .db or .json")],
}


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [(name, *case) for name, cases in DAMAGED.items() for case in cases],
    ids=[f"{name}-{n}" for name, cases in DAMAGED.items() for n in range(len(cases))],
)
def test_a_foreign_or_damaged_file_is_one_error(
    name: str, data: bytes, reason: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(data)
    message = refused("profile", "compare", tmp_path / name, tmp_path / name)
    assert name in message
    assert reason in message
    assert len(message) < 600


def test_what_holds_no_profile_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "other.db") as db:
        db.execute("CREATE TABLE kernels (id INTEGER)")
    db.close()
    os.mkfifo(tmp_path / "x.csv")
    (tmp_path / "empty").mkdir()
    for name, reason in (
        ("other.db", "no view kernels"),
        ("x.csv", "is a pipe or a device"),
        ("nothing", "does not exist"),
        ("empty", "has no kernel"),
    ):
        with pytest.raises(ProfileError, match=f"{name}.*{reason}"):
            read(tmp_path / name)


def test_a_trace_that_unpacks_to_more_than_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "MOST_BYTES", 2**20)
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(b" " * 2**21))
    assert "more than 1 MiB unpacked: profile fewer steps" in refused(
        "profile", "compare", path, path
    )


def test_kernels_appear_vanish_and_move(tmp_path: Path) -> None:
    before = of_dispatches([Dispatch("old", 0, 3000), Dispatch("both", 0, 1000)])
    after = of_dispatches([Dispatch("new", 0, 9000), Dispatch("both", 0, 2000)])
    changes = [(change.name, change.kind, change.nanoseconds) for change in compare(before, after)]
    assert changes == [
        ("new", "appeared", 9000),
        ("old", "vanished", -3000),
        ("both", "moved", 1000),
    ]
    rocm_files.trace(tmp_path / "a/x_kernel_trace.csv", "6.2")
    rocm_files.database(tmp_path / "b.db")
    text = printed("profile", "compare", tmp_path / "a", tmp_path / "b.db")
    assert "3 launches in 6.0 us before, 3 in 6.0 us after" in text
    assert "two profiles" in refused("profile", "compare", tmp_path / "a")
