"""Argument types and checks that several commands share."""

import argparse
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from tinyllama.harness.machine.errors import UsageError


def whole(text: str) -> int:
    """An argparse type."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a whole number: use one") from None


def whole_within(low: int, high: int) -> Callable[[str], int]:
    """An argparse type: a whole number from ``low`` to ``high``."""

    def within(text: str) -> int:
        value = whole(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"{value!r:.80} is out of range: use a whole number from {low} to {high}"
            )
        return value

    return within


def number(text: str) -> float:
    """An argparse type."""
    try:
        return float(text)
    except ValueError:
        message = f"{text!r:.80} is not a number: use one like 3e-4"
        raise argparse.ArgumentTypeError(message) from None


def file_path(text: str) -> Path:
    """An argparse type: a path that a file can have, whether the file exists or not."""
    try:
        if not text:
            raise ValueError("an empty path")
        os.stat(text)  # through links, of which some lead to themselves
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass  # the code that opens the file reports that
    except (ValueError, OSError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        message = f"{text!r:.80} names no file ({why}): name one"
        raise argparse.ArgumentTypeError(message) from None
    return Path(text)


def check_known(option: str, given: Iterable[str] | None, known: Iterable[str]) -> None:
    """Raise UsageError for a name that does not exist; the message lists those that do."""
    names = list(known)
    for name in given or ():
        if name not in names:
            raise UsageError(f"{option} {name!r:.80} does not exist: use one of {', '.join(names)}")
