"""Ctrl-C, SIGTERM and a time limit end a gate in one way: its processes are killed, so that nothing
waits for their answers, and what was measured so far is reported.
"""

from __future__ import annotations

import argparse
import signal
import threading
from types import FrameType
from typing import Any

from tinyllama.harness.machine import worker

LONGEST = 1_000_000  # seconds of a time limit
_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


def time_limit(text: str) -> float:
    """An argparse type: seconds after which a gate is ended, from 1 to `LONGEST`."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= LONGEST:
        message = f"{text!r:.80} is no time limit: use seconds from 1 to {LONGEST}"
        raise argparse.ArgumentTypeError(message)
    return seconds


class Interruption:
    """Raises KeyboardInterrupt in the main thread at the first signal, or when a time limit is
    over. Further signals are ignored until `close`, so that the report is written whole.

    ended: why, once it has happened; else empty.
    """

    def __init__(self) -> None:
        self.ended = ""
        self.limit: float | None = None
        self._before: dict[signal.Signals, Any] = {}

    def open(self, seconds: float | None, limit: float | None) -> None:
        """Begin. seconds: until the time limit is over; None: there is none. limit: as the user
        gave it."""
        if threading.current_thread() is not threading.main_thread():
            return
        self.limit = limit
        handled = [signal.SIGINT, signal.SIGTERM]
        handled += [] if seconds is None else [signal.SIGALRM]
        self._before = {
            signal_number: signal.signal(signal_number, self._end) for signal_number in handled
        }
        if seconds is not None:
            signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))

    def _end(self, number: int, frame: FrameType | None) -> None:
        if self.ended:
            return
        limit = f"the time limit of {self.limit:g} s" if self.limit is not None else ""
        self.ended = _NAMES.get(signal.Signals(number), limit)
        worker.end_all()
        raise KeyboardInterrupt(self.ended)

    def close(self) -> None:
        """Restore what was before."""
        if signal.SIGALRM in self._before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for signal_number, handler in self._before.items():
            signal.signal(signal_number, handler)
        self._before = {}
        worker.end_all(False)
