"""What options of several commands are checked for."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from tinyllama.harness.machine.errors import UsageError


def whole(text: str) -> int:
    """An argparse type."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number: use one") from None


def number(text: str) -> float:
    """An argparse type."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number: use one like 3e-4") from None


def check_known(option: str, given: Iterable[str] | None, known: Iterable[str]) -> None:
    """Raise UsageError for a name that does not exist; the message has those that do."""
    names = list(known)
    for name in given or ():
        if name not in names:
            raise UsageError(f"{option} {name!r} does not exist: use one of {', '.join(names)}")
