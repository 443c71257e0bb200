"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from tinyllama.model.config import ConfigError


def check_writable(path: Path, option: str) -> None:
    """Raise ConfigError, naming the option, when a file could not be written at ``path``."""
    folder = path.parent
    if path.is_dir():
        raise ConfigError(f"{option} {str(path)!r} is a folder: name a file in it")
    _check_regular(path, f"{option} ")
    if not folder.is_dir():
        raise ConfigError(f"{option} {str(path)!r}: no folder {str(folder)!r}; make it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{option} {str(path)!r}: folder {str(folder)!r} is not writable; name another"
        )


def _check_regular(path: Path, option: str = "") -> None:
    """Refuse a pipe or a device: putting a file in its place would take it away."""
    if path.exists() and not path.is_file():
        raise ConfigError(
            f"{option}{str(path)!r} is a pipe or a device, which would be replaced: name a file"
        )


def check_apart(*options: tuple[str, Path | None]) -> None:
    """Raise ConfigError when two options name one file, of which one would be lost."""
    named: dict[str, str] = {}
    for option, path in options:
        if path is None:
            continue
        other = named.setdefault(os.path.realpath(path), option)
        if other != option:
            raise ConfigError(f"{other} and {option} are both {str(path)!r}: name two files")


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then put it in the place of ``path``.

    Whoever reads ``path`` sees the old file or the new one; on an error the old one stays.
    The mode is that of any new file: safetensors would leave one that nobody else can read.
    Raises ConfigError where ``path`` is a pipe or a device.
    """
    _check_regular(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        write(temporary)
        temporary.chmod(mode)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
