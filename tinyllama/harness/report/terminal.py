"""The console that commands print on. Nothing here needs torch."""

import sys
from typing import IO

from rich.console import Console

_PIPED_WIDTH = 120  # columns if the terminal's width is unknown; the diagnosis fits


def console(stream: IO[str] | None = None) -> Console:
    """A console on stdout, or another stream, that takes every text literally; names may hold
    brackets."""
    stream = stream or sys.stdout
    width = None if stream.isatty() else _PIPED_WIDTH
    return Console(file=stream, width=width, markup=False, highlight=False, emoji=False)
