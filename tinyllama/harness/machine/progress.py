"""What a command that takes long is doing: one line of a terminal, elsewhere a line a minute."""

import threading
import time
from collections.abc import Callable
from typing import TextIO

EVERY = 60.0  # seconds between lines of a log
REDRAWN = 1.0  # seconds between changes of a terminal's line
WIDEST = 100  # characters of a terminal's line
# Behind what is in the line already, and erased before more is written.
_SAVE, _ERASE, _RESTORE = "\x1b7", "\x1b[K", "\x1b8"


class Progress:
    """Shows a text, and the seconds since it began, while it is entered.

    with Progress(write, redraw) as doing:
        doing("compiling rms_norm")

    write: prints a line. redraw: replaces the last line of a terminal; None where there is none.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        redraw: Callable[[str], None] | None = None,
        interval: float = EVERY,
    ) -> None:
        self._write, self._redraw, self._interval = write, redraw, interval
        self._text, self._began = "", time.monotonic()
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread: threading.Thread

    def __call__(self, text: str) -> None:
        """From now on, this is done."""
        with self._lock:
            if text != self._text:
                self._text, self._began = text, time.monotonic()

    def line(self, text: str) -> None:
        """Print a line at once, above the one that is redrawn."""
        with self._lock:
            if self._redraw is not None:
                self._redraw("")
            self._write(f"{time.strftime('%H:%M:%S')} {text}")

    def __enter__(self) -> "Progress":
        self._over.clear()
        self._thread = threading.Thread(target=self._show, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._redraw is not None:
            self._redraw("")

    def _show(self) -> None:
        while not self._over.wait(self._interval if self._redraw is None else REDRAWN):
            with self._lock:
                if not self._text:
                    continue
                text = f"{self._text} ({time.monotonic() - self._began:.0f} s)"
                if self._redraw is not None:
                    self._redraw(text)
                else:
                    self._write(f"{time.strftime('%H:%M:%S')} {text}")


def of_stream(stream: TextIO, before: str = "") -> Progress:
    """Shown in a stream. before: what comes before a line, where others leave theirs open."""

    def write(line: str) -> None:
        stream.write(f"{before}{line}\n")
        stream.flush()

    def redraw(text: str) -> None:
        stream.write(f"{_SAVE} {text[:WIDEST]}{_ERASE}{_RESTORE}")
        stream.flush()

    return Progress(write, redraw if stream.isatty() else None)
