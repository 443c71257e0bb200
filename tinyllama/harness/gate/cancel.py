"""Ctrl-C, SIGTERM and a time limit end a gate in one way: its processes are killed, so that nothing
waits for their answers, and what was measured so far is reported.
"""

import signal
import time
from types import FrameType

from tinyllama.harness.machine import worker

SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class Interruption:
    """Raises KeyboardInterrupt in this process's main thread at the first signal, or when a time
    limit is over. Further signals are ignored, so that the report is written whole.

    limit: seconds, as the user gave it; None: there is none. ended: why, once it has happened; else
    empty.
    """

    def __init__(self, limit: float | None) -> None:
        self.limit, self.ended = limit, ""

    def begin(self, began: float) -> None:
        """From now on, with signals that have waited. began: when the limit did, by
        `time.monotonic`."""
        for number in SIGNALS:
            signal.signal(number, self._end)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if self.limit is not None:
            signal.signal(signal.SIGALRM, self._end)
            left = began + self.limit - time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, max(left, 1e-3))

    @staticmethod
    def ignore() -> None:
        """From now on nothing interrupts: the report is written."""
        for number in (*SIGNALS, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)

    def _end(self, number: int, frame: FrameType | None) -> None:
        if self.ended:
            return
        self.ended = SIGNALS.get(signal.Signals(number)) or f"the time limit of {self.limit:g} s"
        worker.end_all()
        raise KeyboardInterrupt(self.ended)
