"""Waiting is shown: a line that is redrawn on a terminal, a line now and then in a log."""

import contextlib
import os
import pty
import re
import time
from collections.abc import Callable

import pytest

from tinyllama.harness.machine import progress
from tinyllama.harness.machine.progress import Progress, of_stream


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


def test_a_terminal_has_one_line_that_is_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "REDRAWN", 0.01)
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as out:
        with of_stream(out) as doing:
            doing("compiling")
            time.sleep(0.2)
            doing.line("a line")
        out.write("the end")
    parts = [b""]
    with contextlib.suppress(OSError):  # its other end is closed
        while part := os.read(ours, 10**6):
            parts.append(part)
    os.close(ours)
    text = b"".join(parts).decode()
    assert text.count("compiling (0 s)") > 2
    assert text.endswith("\x1b7 \x1b[K\x1b8the end"), "what was redrawn is erased"
    assert "a line\r\n" in text
