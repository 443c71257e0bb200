"""Command lines of external profilers: programs that accept what the real ones accept, by version
of ROCm, take them. No AMD machine is behind any of this."""

import sys
import time
from pathlib import Path

import pytest

from correctness_tests.support import profiler_files
from tinyllama.cli.profile import PROFILERS
from tinyllama.profiling import running
from tinyllama.profiling.command_lines import Line, MissingToolError, command_lines
from tinyllama.profiling.readers import read

PROGRAM = (sys.executable, "-c", "pass")
EXTERNAL = [
    (tool, profiler)
    for tool, profilers in PROFILERS.items()
    for profiler in profilers
    if profiler != "torch"
]


@pytest.mark.parametrize("version", ["6.3", "7.0"])
@pytest.mark.parametrize(("tool", "profiler"), EXTERNAL)
def test_stand_ins_take_every_command_and_leave_files(
    tool: str, profiler: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binaries = profiler_files.install(tmp_path / "rocm", version)
    monkeypatch.setenv("PATH", f"{binaries}:/usr/bin:/bin")
    folder = running.new_folder(tmp_path / "profiles", tool)
    for line in command_lines(tool, profiler, folder, PROGRAM):
        running.run(line, folder, 60)
    if tool in ("hotspots", "counters"):
        profile = read(folder)
        assert "rms_norm_forward" in {total.name for total in profile.totals}
        assert bool(profile.counters) is (tool == "counters")
    if tool == "rocprof-compute":
        assert "Detected Kernels" in (folder / running.LOG).read_text()


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("6.2", "ROCm 6.2, whose profilers take other options"),
        ("", "no version in .info/version"),
        (None, "rocprofv3 is not installed"),
    ],
)
def test_missing_old_or_unknown_rocm_is_refused(
    version: str | None, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    binaries = profiler_files.install(tmp_path / "rocm", "6.4")
    (tmp_path / "rocm/.info/version").write_text(version or "")
    monkeypatch.setenv("PATH", str(tmp_path if version is None else binaries))
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "nowhere"))
    with pytest.raises(MissingToolError, match=reason):
        command_lines("trace", "rocprofv3", tmp_path, PROGRAM)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            Line((sys.executable, "-c", "print('the last line'); raise SystemExit(3)")),
            r"status 3: the last line; .*log\.txt",
        ),
        (Line((*PROGRAM,), ("*.pftrace",)), r"wrote no \*\.pftrace"),
        (Line(("no-such-program",)), "no-such-program cannot be started"),
    ],
    ids=["status", "no file", "no program"],
)
def test_program_that_fails_is_an_error(line: Line, reason: str, tmp_path: Path) -> None:
    with pytest.raises(running.ProfiledError, match=reason):
        running.run(line, tmp_path, 60)


def test_program_that_takes_too_long_ends_with_its_children(tmp_path: Path) -> None:
    late = tmp_path / "late"
    child = f"import time; time.sleep(2); open({str(late)!r}, 'w')"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with pytest.raises(running.ProfiledError, match="more than 1 s: use fewer steps"):
        running.run(Line((sys.executable, "-c", program)), tmp_path, 1)
    time.sleep(2.5)
    assert not late.exists()
