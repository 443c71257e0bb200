"""A profiled program in a process of its own: a time limit, its output kept, and a folder."""

import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tinyllama.harness.machine.errors import RunFailedError, UsageError
from tinyllama.harness.machine.files import write_json
from tinyllama.harness.records.results import current_commit, now, versions
from tinyllama.profiling.command_lines import Line

LOG = "log.txt"
FACTS = "profile.json"


class ProfiledError(RunFailedError):
    """A profiled program that failed or took too long; its output is in the folder's log."""


def new_folder(root: Path, tool: str) -> Path:
    """Make ``<root>/<tool>_<time>``. Raises UsageError where it cannot be made."""
    stamp = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S-%f")
    folder = root / f"{tool}_{stamp}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        fix = "name a folder that can be written"
        raise UsageError(f"--output {str(root)!r}: {error.strerror}; {fix}") from error
    return folder


def run(line: Line, folder: Path, seconds: float) -> None:
    """Run one command; what it prints is appended to the folder's log.

    Raises ProfiledError when it fails, takes longer than ``seconds``, or leaves no file of a
    kind that it must leave.
    """
    argv = [match for word in line.argv for match in _expanded(word, folder)]
    log_path = folder / LOG
    root = str(Path(__file__).resolve().parents[2])  # the program finds this package anywhere
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    with log_path.open("a", encoding="utf-8") as log:
        log.write(f"$ {shlex.join(argv)}\n")
        log.flush()
        try:
            process = subprocess.Popen(
                argv,
                cwd=folder if line.inside else None,
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise ProfiledError(f"{argv[0]} cannot be started: {error.strerror}") from error
        try:
            status = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise ProfiledError(
                f"{argv[0]} took more than {seconds:.0f} s: use fewer steps, or a larger "
                f"--time-limit; its output is in {log_path}"
            ) from None
        finally:
            _end(process)
    missing = [pattern for pattern in line.files if not any(folder.rglob(pattern))]
    if status:
        lines = log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        fault = f"ended with status {status}: {lines[-1].strip()}"
    elif missing:
        fault = f"wrote no {missing[0]} in {folder}"
    else:
        return
    raise ProfiledError(f"{argv[0]} {fault}; its output is in {log_path}")


def _expanded(word: str, folder: Path) -> list[str]:
    """Replace a word with a ``*`` by the folders that it means below the output folder."""
    if "*" not in word:
        return [word]
    there = (path for path in folder.glob(word) if path.is_dir())
    return sorted(str(path.relative_to(folder)) for path in there) or [word]


def _end(process: subprocess.Popen[Any]) -> None:
    """End a command and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def note(folder: Path, tool: str, lines: Sequence[Line], profiler: str, workload: str) -> None:
    """Write what is run, and with which versions."""
    facts = {
        "tool": tool,
        "profiler": profiler,
        "workload": workload,
        "commands": [shlex.join(line.argv) for line in lines],
        "versions": versions(),
        "commit": current_commit(),
        "date": now(),
    }
    write_json(folder / FACTS, facts)
