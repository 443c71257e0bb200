"""Ctrl-C and SIGTERM: both end a command in the same way, and neither in the middle of a step."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_BOTH = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Let SIGTERM, by which schedulers end a job, raise what Ctrl-C raises: KeyboardInterrupt."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt("SIGTERM")

    if not _receives_signals():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def held_interrupts() -> Iterator[list[int]]:
    """Delay Ctrl-C and SIGTERM until the end: an update must not stop half way. Gives the list of
    those that came meanwhile."""
    delayed: list[int] = []
    if not _receives_signals():
        yield delayed
        return
    before = {sent: signal.signal(sent, lambda number, _: delayed.append(number)) for sent in _BOTH}
    try:
        yield delayed
    finally:
        for sent, handler in before.items():
            signal.signal(sent, handler)
    if delayed:
        signal.raise_signal(delayed[0])


def _receives_signals() -> bool:
    return threading.current_thread() is threading.main_thread()
