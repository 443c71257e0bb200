"""Command lines of external profilers: programs that accept what the real ones accept, by version
of ROCm, take them. No AMD machine is behind any of this."""

import re
import sys
import time
from pathlib import Path

import pytest

from correctness_tests.support import rocm_files
from tinyllama.profiling import rocprof, running
from tinyllama.profiling.command_lines import EXTERNAL, Line, MissingToolError

PROGRAM = (sys.executable, "-c", "pass")
VERSIONS = ("6.2", "6.3", "6.4", "7.0", "7.1")
OF_ROCM = [key for key, tool in EXTERNAL.items() if tool.rocm]


@pytest.fixture
def installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> str:
    """A ROCm of a version, and nothing else in PATH but the system's programs."""
    binaries = rocm_files.install(tmp_path / "rocm", request.param)
    monkeypatch.setenv("PATH", f"{binaries}:/usr/bin:/bin")
    return str(request.param)


@pytest.mark.parametrize("installed", VERSIONS, indirect=True)
@pytest.mark.parametrize("key", OF_ROCM, ids="-".join)
def test_every_command_is_taken_and_leaves_its_files(
    key: tuple[str, str], installed: str, tmp_path: Path
) -> None:
    folder = running.new_folder(tmp_path / "profiles", key[0])
    for line in EXTERNAL[key].lines(folder, PROGRAM):
        running.run(line, folder, 60)
    if key[1] == "rocprofv3" and key[0] != "trace":
        found = rocprof.read(folder)
        assert "rms_norm_forward" in {one.name for one in found.totals}
        assert bool(found.counters) is (key[0] == "counters")
    if key[0] == "rocprof-compute":
        assert "Detected Kernels" in (folder / running.LOG).read_text()


@pytest.mark.parametrize("installed", ["7.0"], indirect=True)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--stats",), "No tracing options were enabled"),
        (("--hsa-stats", "--kernel-trace"), "unrecognized arguments"),
        (("--kernel-trace", "--output-format", "otf2"), "invalid choice"),
    ],
)
def test_what_the_documents_have_wrong_is_refused(
    words: tuple[str, ...], said: str, installed: str, tmp_path: Path
) -> None:
    """And so what stands for the profilers tells right from wrong."""
    line = Line(("rocprofv3", *words, "-d", str(tmp_path), "-o", "x", "--", *PROGRAM))
    with pytest.raises(running.ProfiledError, match=said):
        running.run(line, tmp_path, 60)


@pytest.mark.parametrize("installed", ["6.2"], indirect=True)
def test_counters_of_the_first_release_are_named_in_a_file(installed: str, tmp_path: Path) -> None:
    (line,) = EXTERNAL["counters", "rocprofv3"].lines(tmp_path, PROGRAM)
    assert "--pmc" not in line.argv
    assert dict(line.writes)["counters.txt"].startswith("pmc: SQ_WAVES")


@pytest.mark.parametrize(
    ("version", "said"),
    [("6.1", "ROCm 6.1, which has no rocprofv3 that works"), ("", "no version in .info/version")],
)
def test_an_old_or_unknown_rocm_is_refused_with_the_reason(
    version: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    binaries = rocm_files.install(tmp_path / "rocm", "6.4")
    (tmp_path / "rocm/.info/version").write_text(version)
    monkeypatch.setenv("PATH", str(binaries))
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "nowhere"))
    with pytest.raises(MissingToolError, match=said):
        EXTERNAL["trace", "rocprofv3"].lines(tmp_path, PROGRAM)


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for tool in EXTERNAL.values():
        with pytest.raises(MissingToolError, match=f"{tool.executables[0]} is not installed"):
            tool.lines(tmp_path, PROGRAM)


# -- a profiled program ---------------------------------------------------------------------------


def python(text: str, *files: str) -> Line:
    return Line((sys.executable, "-c", text), files)


def test_a_program_that_fails_keeps_its_output(tmp_path: Path) -> None:
    with pytest.raises(running.ProfiledError, match=r"status 3: the last line; .*log\.txt"):
        running.run(python("print('the last line'); raise SystemExit(3)"), tmp_path, 60)
    assert "the last line" in (tmp_path / running.LOG).read_text()


def test_a_program_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    child = f"import time; time.sleep(60); open({str(tmp_path / 'late')!r}, 'w')"
    text = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    start = time.monotonic()
    with pytest.raises(running.ProfiledError, match="more than 1 s: use fewer steps"):
        running.run(python(text), tmp_path, 1)
    assert time.monotonic() - start < 30
    while any(child in text for text in _commands()):  # a signal takes a moment
        assert time.monotonic() - start < 30
        time.sleep(0.05)


def _commands() -> list[str]:
    """The command lines of all processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_text())
        except OSError:
            continue
    return found


def test_a_program_that_leaves_no_file_has_failed(tmp_path: Path) -> None:
    with pytest.raises(running.ProfiledError, match=re.escape("wrote no *.pftrace")):
        running.run(python("pass", "*.pftrace"), tmp_path, 60)


def test_a_program_that_cannot_be_started_is_named(tmp_path: Path) -> None:
    with pytest.raises(running.ProfiledError, match="no-such-program cannot be started"):
        running.run(Line(("no-such-program",)), tmp_path, 60)


def test_folders_of_one_second_are_apart(tmp_path: Path) -> None:
    made = {running.new_folder(tmp_path, "trace") for _ in range(5)}
    assert len(made) == 5
