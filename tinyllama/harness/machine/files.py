"""Files that are written whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tinyllama.harness.machine.errors import UsageError


class NotWrittenError(OSError):
    """A file could not be written; what it held before is still there."""


READABLE = 0o644  # by everyone: records and histories are shared between users


def write_whole(path: Path, write: Callable[[Path], object], mode: int | None = None) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then replace ``path`` with it.

    A reader of ``path`` sees the old file or the new one; after an error it sees the old one. The
    file has ``mode``, or that of any new file, whatever ``write`` leaves (safetensors: owner only).
    A temporary file left by a process that was killed is named ``.NAME.*.part``.

    Raises UsageError where ``path`` is a pipe or a device, NotWrittenError where writing fails.
    """
    _check_regular(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        temporary.touch(exist_ok=False)
        plain = temporary.stat().st_mode
        write(temporary)
        temporary.chmod(plain if mode is None else mode)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise NotWrittenError(
            f"{str(path)!r} cannot be written: {error.strerror or error}; what was there before is "
            "unchanged: free some space, or name another place"
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def replace_text(path: Path, text: str) -> None:
    """Write a text that everyone can read, as `write_whole` does; make a missing folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NotWrittenError(f"{str(path.parent)!r} cannot be made: {error.strerror}") from error
    write_whole(path, lambda part: part.write_text(text, encoding="utf-8"), READABLE)


def write_json(path: Path, data: Any) -> None:
    """Write data as JSON as `write_whole` does. Raises ValueError for NaN and infinity."""
    replace_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n")


def write_new(path: Path, content: bytes) -> None:
    """Write a file that everyone can read, whole or not at all, and never over another one.

    Raises FileExistsError where there is one, by whomever it was made.
    """
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        os.chmod(file.name, READABLE)
        os.link(file.name, path)


@contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Read a file and replace it while no other process does so. The lock is a file in the folder
    for temporary files, named after the path."""
    from filelock import FileLock  # it imports asyncio, which --help does not need

    name = f"tinyllama-file-{zlib.crc32(str(path.resolve()).encode()):08x}.lock"
    with FileLock(Path(tempfile.gettempdir()) / name, mode=0o666):
        yield


# -- paths that options name, checked before anything runs ------------------------------------


def check_writable(path: Path | None, option: str) -> None:
    """Raise UsageError, naming the option, when no file could be written at ``path``, if any."""
    if path is None:
        return
    folder = path.parent
    named = f"{option} {str(path)!r}"
    if path.is_dir():
        raise UsageError(f"{named} is a folder: name a file in it")
    _check_regular(path, f"{option} ")
    if not folder.is_dir():
        raise UsageError(f"{named}: no folder {str(folder)!r}; make it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{named}: folder {str(folder)!r} is not writable; name another")


def check_apart(*options: tuple[str, Path | None]) -> None:
    """Raise UsageError when two options name one file: one of the two would be lost."""
    named: dict[str, str] = {}
    for option, path in options:
        if path is None:
            continue
        other = named.setdefault(os.path.realpath(path), option)
        if other != option:
            raise UsageError(f"{other} and {option} are both {str(path)!r}: name two files")


def check_results_dir(folder: Path) -> None:
    """Make the folder that ``--results-dir`` names, before anything is measured.

    Raises UsageError where nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"--results-dir {folder}: {error.strerror}; name a folder that can be written"
        ) from error


def _check_regular(path: Path, option: str = "") -> None:
    """Refuse a pipe or a device: a file would replace it."""
    if path.exists() and not path.is_file():
        raise UsageError(
            f"{option}{str(path)!r} is a pipe or a device, which would be replaced: name a file"
        )
