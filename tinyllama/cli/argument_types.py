"""Options of commands: from the fields of dataclasses, and by types that several commands share."""

import argparse
import os
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from tinyllama.harness.machine.errors import UsageError


def add_options(parser: argparse.ArgumentParser, *configs: Any) -> None:
    """Add an option for each field of dataclasses that has a help text: ``--num-heads`` for
    ``num_heads``. An option that is not given is None.

    configs: instances, whose values are shown as the defaults.
    """
    for config in configs:
        for field in fields(config):
            if "help" not in field.metadata:
                continue
            help, default = field.metadata["help"], getattr(config, field.name)
            named_default = "default" in help or default is None
            kinds: dict[Any, Callable[[str], Any]] = {int: int, float: float, str: str}
            parser.add_argument(
                f"--{field.name.replace('_', '-')}",
                type=kinds.get(field.type, number),
                choices=field.metadata["choices"],
                metavar=field.metadata["metavar"],
                help=help if named_default else f"{help} (default {default})",
            )


def whole_within(low: int, high: int) -> Callable[[str], int]:
    """An argparse type: a whole number from ``low`` to ``high``."""

    def within(text: str) -> int:
        if not low <= (value := int(text)) <= high:
            raise argparse.ArgumentTypeError(
                f"{text:.80} is out of range: use a whole number from {low} to {high}"
            )
        return value

    within.__name__ = "int"  # in argparse's message
    return within


def number(text: str) -> float | str:
    """An argparse type: a number, or the word none."""
    return text if text == "none" else float(text)


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


def check_known(option: str, names: Iterable[str] | None, known: Iterable[str]) -> None:
    """Raise UsageError for a name that does not exist; the message lists those that do."""
    there = list(known)
    for name in names or ():
        if name not in there:
            raise UsageError(f"{option} {name!r:.80} does not exist: use one of {', '.join(there)}")
