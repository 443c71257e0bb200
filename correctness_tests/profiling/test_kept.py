"""Summaries of profiles that are kept, and the study of recorded sweeps."""

import argparse
import json
from pathlib import Path

import pytest
import torch

from correctness_tests.support import rocm_files
from correctness_tests.support.commands import printed, refused, tinyllama
from tinyllama.cli import profile as profile_command
from tinyllama.harness.machine.device import device_name
from tinyllama.harness.records import results
from tinyllama.harness.records.entries import Quartiles, SweepEntry
from tinyllama.profiling import kept, running, shown
from tinyllama.profiling.command_lines import Line, MissingToolError
from tinyllama.profiling.kernels import ProfileError

TINY = ["--preset", "tiny", "--seq-len", "16", "--batch-size", "1", "--device", "cpu"]
CPU = torch.device("cpu")


def test_a_summary_is_kept_and_can_be_compared(tmp_path: Path) -> None:
    folder = running.new_folder(tmp_path / "profiles", "hotspots")
    running.note(folder, "hotspots", [Line(("rocprofv3",))], workload="w")
    rocm_files.trace(folder / "x_kernel_trace.csv", "7.0")
    rocm_files.counters(folder / "x_counter_collection.csv", old=False)
    path = kept.keep("hotspots", "rocprofv3", folder, tmp_path / "results", "AMD Instinct MI325X")
    assert path.parent == tmp_path / "results/amd-instinct-mi325x/profiles"
    found, before = kept.read(path), shown.read(folder)
    assert found is not None
    assert (found.totals, found.counters) == (before.totals, before.counters)
    content = json.loads(path.read_text())
    assert content["versions"]["torch"] == torch.__version__
    assert content["commands"] == ["rocprofv3"]
    assert list(results.records(tmp_path / "results")) == [], "it is no record"
    text = printed("profile", "compare", path, folder)
    assert "3 launches in 6.0 us before, 3 in 6.0 us after" in text


def test_what_is_no_summary_of_kernels_is_not_compared(tmp_path: Path) -> None:
    assert kept.read(tmp_path) is None
    path = tmp_path / "a.json"
    path.write_text("[]")
    assert kept.read(path) is None
    path.write_text(json.dumps({"kind": "profile", "found": {"flop": {}}}))
    with pytest.raises(kept.ProfileError, match="summary without kernels"):
        kept.read(path)


def test_the_command_keeps_a_summary_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"parameters": 16, "optimizer states": 32}
    found = {
        "at_peak_bytes": {**sizes, "gradients": 0, "activations": 8},
        "peak_bytes": 56,
        "peak_phase": "backward",
        "fixed_bytes": sizes,
        "course": [("forward", 0, 4), ("backward", 0, 8)],
    }

    def profiled(line: Line, folder: Path, seconds: float) -> None:
        (folder / "memory.json").write_text(json.dumps(found))

    monkeypatch.setattr(running, "run", profiled)
    where = ("--output", tmp_path / "p", "--results-dir", tmp_path / "r")
    printed("profile", "memory", *where, *TINY)
    assert not (tmp_path / "r").exists()
    text = printed("profile", "memory", *where, *TINY, "--keep")
    (path,) = (tmp_path / "r").rglob("*.json")
    assert f"kept {path}" in text
    content = json.loads(path.read_text())
    assert (content["tool"], content["device"]) == ("memory", device_name(CPU))
    assert content["found"] == {name: value for name, value in found.items() if name != "course"}


def test_what_cannot_be_kept_is_refused_before_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    where = ("--output", tmp_path / "p", "--results-dir", tmp_path / "file")
    said = refused("profile", "memory", *TINY, "--keep", *where)
    assert "name a folder that can be written" in said
    assert "remove it" in refused("profile", "study", "--keep")
    binaries = rocm_files.install(tmp_path / "rocm", "6.4")
    monkeypatch.setenv("PATH", f"{binaries}:/usr/bin:/bin")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    said = refused("profile", "trace", "--keep", "--output", tmp_path / "p")
    assert "rocprofv3 leaves no summary of trace" in said
    assert not (tmp_path / "p").exists()


# -- the study ------------------------------------------------------------------------------------


def sweep(tier: str, batch: int, length: int, seconds: float | None, **more: object) -> SweepEntry:
    return SweepEntry(
        name=f"sweep/{tier}/B{batch}T{length}",
        workload="tiny",
        precision="fp32",
        contender=tier,
        role="tier",
        batch_size=batch,
        seq_len=length,
        axis="seq_len",
        seconds=seconds,
        seconds_quartiles=None if seconds is None else Quartiles(seconds, seconds),
        samples_per_second=None if seconds is None else batch / seconds,
        **more,  # type: ignore[arg-type]
    )


def test_the_study_is_a_view_on_the_newest_sweeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for date, factor in (("2030-01-01T00:00:00Z", 9.0), ("2030-01-02T00:00:00Z", 1.0)):
        monkeypatch.setattr(results, "now", lambda date=date: date)
        record = results.new_record(CPU, "sweep-tiny-fp32")
        record.entries = [
            sweep("v1", 4, 128, 0.02 * factor, peak_bytes=2**21),
            sweep("v2", 4, 128, 0.005 * factor, peak_bytes=2**20),
            sweep("v3", 4, 128, None, cannot="no GPU"),
        ]
        record.complete = True
        results.save(record, tmp_path)
    lines = printed("profile", "study", "--results-dir", tmp_path).splitlines()
    rows = [line.split() for line in lines]
    assert ["4", "x", "128", "v1", "20", "200", "1.00x", "2"] in rows
    assert ["4", "x", "128", "v2", "5", "800", "4.00x", "1"] in rows
    assert ["4", "x", "128", "v3", "-", "-", "-", "-"] in rows
    assert "v3: no GPU" in lines
    assert sum(line.startswith("sweep-tiny-fp32: ") for line in lines) == 1


@pytest.mark.parametrize("there", [True, False])
def test_without_a_sweep_it_says_what_measures_one(there: bool, tmp_path: Path) -> None:
    folder = tmp_path if there else tmp_path / "none"
    said = refused("profile", "study", "--results-dir", folder)
    assert "no sweep is recorded in" in said
    command = printed("profile", "study", "--print-command").strip()
    assert command.startswith("pytest perf_tests --record --groups sweep-")
    assert command in said


# -- every tool -----------------------------------------------------------------------------------


def test_all_ends_with_a_page_of_what_each_tool_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tool is here, one is not, and the file of one cannot be read."""

    def profiled(args: argparse.Namespace, tool: str) -> int:
        folder = running.new_folder(args.output, tool)
        if tool == "energy":
            raise MissingToolError("energy cannot be measured here: no | sensor")
        if tool == "counters":
            raise ProfileError("nsight.csv is truncated")
        if tool == "flops":
            return 1
        (folder / "memory.svg").write_text("<svg/>")
        print("printed by", tool)
        return 0

    monkeypatch.setattr(profile_command, "_profile", profiled)
    done = tinyllama("profile", "all", "--output", tmp_path, *TINY)
    assert done.status == 1
    (page,) = tmp_path.glob("all_*/summary.md")
    text = page.read_text()
    assert text.startswith("# Profile of tier v1, tiny, fp32, on cpu\n")
    assert "| memory | done |" in text
    assert "| energy | not here: energy cannot be measured here: no / sensor |" in text
    assert "| counters | failed: nsight.csv is truncated |" in text
    assert "| flops | failed: its folder has a log |" in text
    assert "\n    printed by memory\n" in text
    (picture,) = (link for link in text.splitlines() if link.startswith("![memory of memory]"))
    assert (page.parent / picture.partition("(")[2].rstrip(")")).is_file()
    assert "printed by memory" in done.out
    assert f"summary: {page}" in done.out
    done = tinyllama("profile", "all", "--print-command", "--output", tmp_path / "q", *TINY)
    assert done.status == 1
    assert not list((tmp_path / "q").glob("all_*"))
