"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock


def replace_text(path: Path, text: str) -> None:
    """Put a text in the place of what a file held, or, on an error, leave that as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # for everyone to read
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Read a file and replace it with nobody else doing so; the lock lies in the folder for
    temporary files, named by the file's path."""
    name = f"tinyllama-file-{zlib.crc32(str(path.resolve()).encode()):08x}.lock"
    with FileLock(Path(tempfile.gettempdir()) / name, mode=0o666):
        yield


def check_results_dir(folder: Path) -> None:
    """Make the folder that ``--results-dir`` names, before anything is measured.

    Raises ValueError where nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"--results-dir {folder}: {error.strerror}; name a folder that can be written"
        ) from error
