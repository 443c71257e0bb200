"""Waiting is shown: a line that is redrawn on a terminal, a line now and then in a log."""

import contextlib
import io
import os
import pty
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock, call

import pytest
import torch

from correctness_tests.support.gate_fakes import Script
from tinyllama.harness.gate.watch import Watch, device_lock
from tinyllama.harness.machine import progress
from tinyllama.harness.machine.progress import Progress, of_stream


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_log_has_a_line_now_and_then_with_the_seconds_since_it_began() -> None:
    lines: list[str] = []
    with Progress(lines.append, every=0.02) as doing:
        time.sleep(0.1)
        assert lines == [], "nothing is done yet"
        doing("compiling")
        until(lambda: len(lines) > 2)
        doing("timing")
        until(lambda: "timing" in lines[-1])
    assert re.fullmatch(r"\d\d:\d\d:\d\d compiling \(0 s\)", lines[0])
    count = len(lines)
    time.sleep(0.1)
    assert len(lines) == count, "it goes on after its end"
    with doing:
        until(lambda: len(lines) > count + 1)
    assert progress.EVERY == 60


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


def test_a_stream_that_is_no_terminal_has_whole_lines() -> None:
    out = io.StringIO()
    with of_stream(out, before="\n") as doing:
        doing.line("a line")
    assert re.fullmatch(r"\n\d\d:\d\d:\d\d a line\n", out.getvalue())


def test_what_was_redrawn_is_erased_before_a_line_and_at_the_end() -> None:
    said: list[str] = []
    with Progress(lambda line: said.append(line[9:]), lambda text: said.append(f"<{text}>")) as one:
        one.line("a line")
    assert said == ["<>", "a line", "<>"]


@pytest.mark.parametrize("terminal", [False, True])
def test_what_is_shown_does_not_stay_in_a_buffer(terminal: bool) -> None:
    stream = Mock()
    stream.isatty.return_value = terminal
    doing = of_stream(stream)
    doing.line("a line")
    assert stream.mock_calls[-1] == call.flush()
    with doing:
        pass
    assert stream.mock_calls[-1] == call.flush()
    assert stream.write.call_count == (3 if terminal else 1)


def test_who_waits_for_a_device_is_told_for_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cpu, held = torch.device("cpu"), threading.Event()
    said: list[str] = []

    def hold() -> None:
        with device_lock(cpu, 0):
            held.set()
            until(lambda: bool(said))

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(20)
    with device_lock(cpu, 20, said.append):
        pass
    thread.join()
    assert said == [f"cpu is held by process {os.getpid()}"]


def test_a_busy_machine_is_named_before_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    reasons = ["busy", "busy", None]
    watch = Watch(torch.device("cpu"))
    monkeypatch.setattr(watch, "before", lambda: reasons.pop(0))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    assert watch.wait_until_idle(5, said.append) is None
    assert said == ["busy", "busy"]


def test_a_comparison_says_what_it_does() -> None:
    script, said = Script("a", "b"), list[str]()
    script.slower("a", device_seconds=1.5)
    script.run(doing=said.append)
    for part in (
        "prepare: starting both sides",
        "prepare: a; 0 of 2 settled",
        "time: a; 0 of 2 settled, block 1",
        "confirm: a; 2 of 2 settled, block ",
        "attribute: a; ",
    ):
        assert any(one.startswith(part) for one in said), (part, said)
