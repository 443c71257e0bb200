"""Waiting is shown: a line that is redrawn on a terminal, a line now and then in a log."""

import re
import time
from collections.abc import Callable

from tinyllama.harness.machine.progress import Progress


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_log_has_a_line_now_and_then_with_the_seconds_since_it_began() -> None:
    lines: list[str] = []
    with Progress(lines.append, interval=0.02) as doing:
        doing("compiling")
        until(lambda: len(lines) > 2)
        doing("timing")
        until(lambda: "timing" in lines[-1])
    assert re.fullmatch(r"\d\d:\d\d:\d\d compiling \(0 s\)", lines[0])
