"""Files: written whole or not at all, and read only where they are regular and not too large."""

import errno
import json
import os
import shutil
import stat
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tinyllama.harness.machine.errors import UsageError


class NotWrittenError(OSError):
    """A file could not be written; what it held before is still there."""


LEAST_FREE = 2**16  # bytes: what a text that an option names may take
MOST_BYTES = 64 * 2**20  # of one text that is read; the record of a sweep has some 100 KiB


# -- writing ----------------------------------------------------------------------------------


def write_whole(
    path: Path,
    write: Callable[[Path], object],
    put: Callable[[Path, Path], object] | None = None,
) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then ``put`` it there (`os.replace`).

    A reader of ``path`` sees the old file or the new one; after an error it sees the old one. The
    file has the mode of any new file, whatever ``write`` leaves (safetensors: owner only). A link
    is replaced and not followed: a tree that somebody else made may hold one to any place.

    Raises UsageError where ``path`` is a pipe or a device. Where writing fails, the content goes to
    a folder for temporary files, if it can, and NotWrittenError says where it is.
    """
    _check_regular(path)
    try:
        with _folder_beside(path) as folder:
            part = folder / "content"
            part.touch()
            mode = part.stat().st_mode
            write(part)
            part.chmod(mode)
            with part.open("rb") as file:
                os.fsync(file.fileno())
            (put or os.replace)(part, path)
    except FileExistsError:  # of ``put``
        raise
    except OSError as error:
        kept = ""
        with suppress(OSError):
            copy = Path(tempfile.mkdtemp(prefix="tinyllama-kept-")) / path.name[-40:]
            write(copy)
            kept = f", and the new content is in {str(copy)!r}"
        raise NotWrittenError(
            f"{str(path)!r} cannot be written: {error.strerror or error}; what was there before is "
            f"unchanged{kept}: free some space, or name another place"
        ) from error


def replace_text(path: Path, text: str) -> None:
    """Write a text as `write_whole` does; make a missing folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NotWrittenError(f"{str(path.parent)!r} cannot be made: {error.strerror}") from error
    content = text.encode("utf-8", "backslashreplace")  # names of files need not be UTF-8
    write_whole(path, lambda part: part.write_bytes(content))


def write_json(path: Path, data: Any) -> None:
    """Write data as JSON as `write_whole` does. Raises ValueError for NaN and infinity."""
    replace_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n")


def write_new(path: Path, content: bytes) -> None:
    """Write a file as `write_whole` does, and never over another one.

    Raises FileExistsError where there is one, by whomever it was made.
    """
    write_whole(path, lambda part: part.write_bytes(content), put=os.link)


@contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Read a file and replace it while no other process does so. The lock is a file in the folder
    for temporary files, named after the path."""
    from filelock import FileLock  # it imports asyncio, which --help does not need

    name = f"tinyllama-file-{zlib.crc32(str(path.resolve()).encode()):08x}.lock"
    with FileLock(Path(tempfile.gettempdir()) / name, mode=0o666):
        yield


@contextmanager
def _folder_beside(path: Path) -> Iterator[Path]:
    """A temporary folder on the file system of ``path``, removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix=".tinyllama-", suffix=".part", dir=path.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# -- reading ----------------------------------------------------------------------------------


def read_regular(path: Path, most: int = MOST_BYTES) -> bytes:
    """The content of a file that others may have put there.

    Raises OSError where it cannot be read, ValueError where it is no regular file (a pipe would
    never end) or has more than ``most`` bytes.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # else a pipe would wait for its writer
    try:
        status = os.fstat(handle)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{str(path)!r} is a pipe or a device, not a file")
        content = None
        if status.st_size <= most:  # else nothing is read; a file may grow, or have no size
            with open(handle, "rb", closefd=False) as file:
                content = file.read(most + 1)
    finally:
        os.close(handle)
    if content is None or len(content) > most:
        raise ValueError(f"{str(path)!r} has more than {most} bytes")
    return content


# -- paths that options name, checked before anything runs ------------------------------------


def check_writable(path: Path | None, option: str, needed: int = LEAST_FREE) -> None:
    """Raise UsageError, naming the option, when no file of ``needed`` bytes could be written at
    ``path``, if any."""
    if path is None:
        return
    folder = path.parent
    named = f"{option} {str(path)!r}"
    try:
        if path.is_dir():
            raise UsageError(f"{named} is a folder: name a file in it")
        _check_regular(path, f"{option} ")
        if not folder.is_dir():
            raise UsageError(f"{named}: no folder {str(folder)!r}; make it first")
        with _folder_beside(path):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        raise UsageError(
            f"{named} cannot be written: {error.strerror}; name another place"
        ) from error
    if free < needed:
        raise UsageError(
            f"{named} takes {needed} bytes, and folder {str(folder)!r} has {free} free: free some "
            "space, or name another place"
        )


def real(path: Path) -> Path:
    """A whole path without links. One that leads to itself stays: `Path.resolve` raises
    RuntimeError there before Python 3.13."""
    return Path(os.path.realpath(path))


def check_apart(*options: tuple[str, Path | None]) -> None:
    """Raise UsageError when two options name one file: one of the two would be lost."""
    named: dict[str, str] = {}
    for option, path in options:
        if path is None:
            continue
        first = named.setdefault(os.path.realpath(path), option)
        if first != option:
            raise UsageError(f"{first} and {option} are both {str(path)!r}: name two files")


def check_results_dir(folder: Path, option: str = "--results-dir") -> None:
    """Make the folder that an option names, before anything is measured.

    Raises UsageError where nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"{option} {folder}: {error.strerror}; name a folder that can be written"
        ) from error


def _check_regular(path: Path, option: str = "") -> None:
    """Refuse a pipe or a device: a file would replace it."""
    if path.exists() and not path.is_file():
        raise UsageError(
            f"{option}{str(path)!r} is a pipe or a device, which would be replaced: name a file"
        )
