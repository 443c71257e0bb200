"""A profiled program in a process of its own: a time limit, its output kept, and a folder."""

import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.machine.files import write_json
from tinyllama.harness.records.results import current_commit, now, versions
from tinyllama.profiling.command_lines import Line

LOG = "log.txt"
FACTS = "profile.json"


class ProfiledError(RuntimeError):
    """A profiled program that failed or took too long; its output is in the folder's log."""


def new_folder(root: Path, tool: str) -> Path:
    """``<root>/<tool>_<timestamp>``, made. Raises UsageError where it cannot be made."""
    stamp = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    for number in range(100):
        folder = root / (f"{tool}_{stamp}" + (f"-{number}" if number else ""))
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
        except OSError as error:
            raise UsageError(
                f"--output {str(root)!r}: {error.strerror}; name a folder that can be written"
            ) from error
    raise UsageError(f"--output {str(root)!r} has a hundred profiles of this second: wait a moment")


def run(line: Line, folder: Path, seconds: float) -> None:
    """Run one command; what it prints is appended to the folder's log.

    Raises ProfiledError when it fails, takes longer than ``seconds``, or leaves no file of a
    kind that it must leave.
    """
    for name, text in line.writes:
        (folder / name).write_text(text, encoding="utf-8")
    inside = folder if line.inside else None
    argv = [match for word in line.argv for match in _expanded(word, inside)]
    with (folder / LOG).open("a", encoding="utf-8") as log:
        log.write(f"$ {shlex.join(argv)}\n")
        log.flush()
        try:
            process = subprocess.Popen(
                argv,
                cwd=inside,
                env={**os.environ, "PYTHONPATH": _python_path()},
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
                f"--time-limit; its output is in {folder / LOG}"
            ) from None
        finally:
            _end(process)
    if status:
        raise ProfiledError(
            f"{argv[0]} ended with status {status}: {last_words(folder)}; its output is in "
            f"{folder / LOG}"
        )
    for pattern in line.files:
        if not any(folder.rglob(pattern)):
            raise ProfiledError(
                f"{argv[0]} wrote no {pattern} in {folder}; its output is in {folder / LOG}"
            )


def _python_path() -> str:
    """The program is run from any folder, and finds this package."""
    here = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))


def _expanded(word: str, folder: Path | None) -> list[str]:
    """A word with a ``*`` stands for what is there in the folder that the command runs in."""
    if folder is None or "*" not in word:
        return [word]
    return sorted(str(path.relative_to(folder)) for path in folder.glob(word) if path.is_dir()) or [
        word
    ]


def _end(process: subprocess.Popen[Any]) -> None:
    """Nothing that the command started survives it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_words(folder: Path) -> str:
    """The last line that a program printed."""
    lines = (folder / LOG).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "it printed nothing"


def note(folder: Path, tool: str, lines: Sequence[Line], **more: Mapping[str, Any] | Any) -> None:
    """Write what was run, and with which versions."""
    facts = {
        "tool": tool,
        "commands": [shlex.join(line.argv) for line in lines],
        "versions": versions(),
        "commit": current_commit(),
        "date": now(),
        **more,
    }
    write_json(folder / FACTS, facts)
