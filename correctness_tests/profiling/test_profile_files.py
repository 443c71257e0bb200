"""Files of profilers: every version is read alike, and what is no such file is refused."""

import gzip
import json
import os
import sqlite3
import sys
from pathlib import Path

import pytest

from correctness_tests.support import nsight_files, rocm_files
from correctness_tests.support.nsight_files import HEAD, WARPS
from tinyllama.profiling import chrome, nsight, rocprof, running, shown
from tinyllama.profiling.command_lines import EXTERNAL, METRICS, NSIGHT
from tinyllama.profiling.kernels import Dispatch, Profile, ProfileError, compare, of_dispatches

NAMES = {name for name, *_ in rocm_files.LAUNCHES}


def held(profile: Profile) -> None:
    """The figures of `rocm_files.LAUNCHES`, by hand."""
    assert {one.name: (one.calls, round(one.seconds * 1e9)) for one in profile.totals} == {
        rocm_files.LAUNCHES[0][0]: (1, 3000),
        "rms_norm_forward": (2, 3000),
    }
    assert profile.calls == 3


@pytest.mark.parametrize("version", rocm_files.TRACES)
def test_a_trace_of_every_version_is_read(version: str, tmp_path: Path) -> None:
    path = rocm_files.trace(tmp_path / "host/17_kernel_trace.csv", version)
    found = rocprof.read(tmp_path)
    held(found)
    assert found.busy_seconds == pytest.approx(6e-6)
    assert found.span_seconds == pytest.approx(8e-6)
    streams = {one.stream for one in found.dispatches}
    assert streams == ({3} if "Stream_Id" in rocm_files.TRACES[version] else {1})
    held(shown.read(path))


def test_columns_are_found_whatever_their_case(tmp_path: Path) -> None:
    path = rocm_files.trace(tmp_path / "a_kernel_trace.csv", "7.0")
    header, _, rest = path.read_text().partition("\n")
    path.write_text(f"{header.upper()}\n{rest}")
    held(rocprof.read(tmp_path))


def test_statistics_are_read_where_there_is_no_trace(tmp_path: Path) -> None:
    path = rocm_files.stats(tmp_path / "a_kernel_stats.csv")
    held(rocprof.read(tmp_path))
    held(shown.read(path))
    rocm_files.trace(tmp_path / "a_kernel_trace.csv", "6.4")
    held(rocprof.read(tmp_path))  # and not counted twice


@pytest.mark.parametrize("old", [True, False])
def test_counters_are_summed_over_launches(old: bool, tmp_path: Path) -> None:
    path = rocm_files.counters(tmp_path / "pmc_1/a_counter_collection.csv", old=old)
    for found in (rocprof.read(tmp_path), shown.read(path)):
        assert {one.kernel: one.value for one in found.counters}["rms_norm_forward"] == 32
        assert {one.counter for one in found.counters} == {"SQ_WAVES"}


def test_a_database_is_read_by_its_views(tmp_path: Path) -> None:
    path = rocm_files.database(tmp_path / "a_results.db")
    for found in (rocprof.read(tmp_path), shown.read(path)):
        held(found)
        assert {one.kernel: one.value for one in found.counters}["rms_norm_forward"] == 32
        assert {one.stream for one in found.dispatches} == {3}


def trace_of(names: list[tuple[str, str]]) -> bytes:
    """A trace in Chrome's format: categories and names, one after the other."""
    events = [
        {"ph": "X", "cat": cat, "name": name, "ts": 10 * at, "dur": 5, "tid": 1, "args": {}}
        for at, (cat, name) in enumerate(names)
    ]
    return json.dumps({"traceEvents": events}).encode()


@pytest.mark.parametrize("packed", [False, True])
def test_a_trace_of_pytorch_is_read(packed: bool, tmp_path: Path) -> None:
    data = trace_of([("cpu_op", "aten::mm"), ("kernel", "gemm"), ("kernel", "gemm")])
    path = tmp_path / ("trace.json.gz" if packed else "trace.json")
    path.write_bytes(gzip.compress(data) if packed else data)
    (only,) = shown.read(path).totals
    assert (only.name, only.calls) == ("gemm", 2)
    assert only.seconds == pytest.approx(1e-5)


def test_operators_count_where_there_is_no_kernel_and_inner_ones_do_not(tmp_path: Path) -> None:
    events = [
        {"ph": "X", "cat": "cpu_op", "name": name, "ts": start, "dur": length, "tid": 1}
        for name, start, length in (("outer", 0, 10), ("inner", 2, 3), ("next", 10, 4))
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = {one.name: one.seconds for one in chrome.read(path).totals}
    assert found == {"outer": pytest.approx(1e-5), "next": pytest.approx(4e-6)}


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = rocm_files.trace(tmp_path / "a_kernel_trace.csv", "6.4")
    text = path.read_text()
    for cut in (len(text) - 4, len(text) - 20):
        path.write_text(text[:cut])
        if text[:cut].count(",") == text.count(","):
            continue  # the last cell alone is shorter, which nothing tells
        with pytest.raises(ProfileError, match=r"a_kernel_trace.csv, line \d+: .* truncated"):
            rocprof.read(tmp_path)


WRONG = {
    "foreign_kernel_trace.csv": (b"a,b\n1,2\n", "no column kernel_name"),
    "empty_kernel_trace.csv": (b"", "no column kernel_name"),
    "bytes_kernel_trace.csv": (b"\xff\xfe\x00", "cannot be read"),
    "stats_kernel_stats.csv": (b'"Name","Calls","TotalDurationNs"\n"a",many,3\n', "no number"),
    "text_results.db": (b"not a database, only a text that is long enough to be one" * 9, "rocpd"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_foreign_file_gets_one_clear_error(name: str, tmp_path: Path) -> None:
    content, message = WRONG[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ProfileError, match=message) as raised:
        rocprof.read(tmp_path)
    assert name in str(raised.value)


@pytest.mark.parametrize(
    "content",
    [b"{", b"[]", b'{"traceEvents": []}', b'{"traceEvents": [{"ph": "X", "cat": "kernel"}]}'],
)
def test_a_foreign_trace_gets_one_clear_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(ProfileError, match=r"trace\.json"):
        shown.read(path)


def test_another_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE kernels (id INTEGER)")
    db.close()
    with pytest.raises(ProfileError, match="no view kernels"):
        rocprof.database(path)


@pytest.mark.parametrize("name", ["nothing", "a.txt"])
def test_what_is_no_profile_is_refused_by_name(name: str, tmp_path: Path) -> None:
    if name == "a.txt":
        (tmp_path / name).touch()
    with pytest.raises(ProfileError, match=name):
        shown.read(tmp_path / name)
    with pytest.raises(ProfileError, match="no kernel"):
        shown.read(tmp_path)


DEEP = "[" * 100_000


DAMAGED = ["", "[", DEEP, "[]", "{}", '{"work": 1}', '{"work": [{"x": 1}]}']
DAMAGED += ['{"x": 1' + "0" * 5000 + "}"]


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_file_of_ours_gets_one_clear_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / shown.KERNELS
    path.write_text(text)
    for named in (path, tmp_path):
        with pytest.raises(ProfileError, match=rf"{path} cannot be read: .*; profile again"):
            shown.read(named)
    path.rename(tmp_path / "x.json")
    with pytest.raises(ProfileError, match="cannot be read as a trace"):
        shown.read(tmp_path / "x.json")


@pytest.mark.parametrize("kind", ["csv", "db", "json"])
def test_a_pipe_is_no_profile(kind: str, tmp_path: Path) -> None:
    """Nobody writes into it, so a reader would wait for ever."""
    path = tmp_path / f"x.{kind}"
    os.mkfifo(path)
    with pytest.raises(ProfileError, match="is a pipe or a device"):
        shown.read(path)


def test_kernels_that_appear_vanish_and_move_are_told_from_each_other() -> None:
    before = of_dispatches([Dispatch("old", 0, 3000), Dispatch("both", 0, 1000)])
    after = of_dispatches([Dispatch("new", 0, 9000), Dispatch("both", 0, 2000)])
    found = [
        (change.name, change.kind, round(change.seconds * 1e9)) for change in compare(before, after)
    ]
    assert found == [("new", "appeared", 9000), ("old", "vanished", -3000), ("both", "moved", 1000)]


# -- counters of Nsight Compute: the command that asks for them, and its file ----------------------


def test_the_command_is_taken_and_its_file_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    binaries = nsight_files.install(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{binaries}:/usr/bin:/bin")
    folder = running.new_folder(tmp_path / "profiles", "counters")
    for line in EXTERNAL["counters", "ncu"].lines(folder, (sys.executable, "-c", "pass")):
        running.run(line, folder, 60)
    shown.show("counters", "ncu", folder, 20)
    printed = capsys.readouterr().out
    assert f"{WARPS}   " in printed
    for cell in ("rms_norm_forward", "8192 byte", "75 %"):
        assert cell in printed


def test_times_and_sums_are_over_launches_and_shares_are_means(tmp_path: Path) -> None:
    path = nsight_files.counters(tmp_path / NSIGHT, list(METRICS))
    for found in (shown.read(path), shown.read(tmp_path)):
        held(found)
        norm = {one.counter: one for one in found.counters if one.kernel == "rms_norm_forward"}
        assert (norm["dram__bytes.sum"].value, norm["dram__bytes.sum"].unit) == (8192, "byte")
        assert (norm[WARPS].value, norm[WARPS].unit) == (75, "%")


ROW = '"0","7","gemm","gpu__time_duration.sum"'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("==PROF== Connected\n", "has no counter of Nsight Compute: profile again"),
        ("==PROF== a\n==ERROR== ERR_NVGPUCTRPERM - no permission\n", "ERR_NVGPUCTRPERM"),
        (f'{HEAD}\n{ROW},"nsecond","n/a"\n', r"duration.sum of gemm is 'n/a', no number"),
        (f'{HEAD}\n{ROW},"nsecond","inf"\n', "no number"),
        (f'{HEAD}\n{ROW},"nsecond"\n', "is None, no number"),
        (f'{HEAD}\n{ROW},"nsecond","12', "is truncated"),
        (f'{HEAD}\n{ROW},"cycle","12"\n', "is in 'cycle'"),
        ('"ID","Kernel Name"\n"0","gemm"\n', "has no column 'Metric Name'"),
    ],
)
def test_what_holds_no_counters_is_one_error(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / NSIGHT
    path.write_text(text)
    with pytest.raises(ProfileError, match=message) as raised:
        nsight.read(path)
    assert NSIGHT in str(raised.value)
