"""A run of mutants that is stopped: it ends at once, keeps its results, and leaves nothing."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tools import module_mutants, mutant_record, mutant_tests
from tools.mutant_record import ROOT
from tools.tested import KILLED

# A server of tests that do not end. Each leaves a file, and starts a process that it names.
SERVER = """import subprocess, sys, time
from tools import tested


def answer(request, folder, collected):
    left = subprocess.Popen(["sleep", "60"], start_new_session=True)
    (folder / "left").touch()
    with open(sys.argv[1], "a") as file:
        print(left.pid, file=file)
    time.sleep(60)


tested._answer = answer
tested.serve(sys.stdin, sys.stdout)
"""


def named(pids: Path) -> int:
    """The process that a test has started, once it has."""
    end = time.monotonic() + 60
    while not (pids.exists() and pids.read_text().endswith("\n")):
        assert time.monotonic() < end
        time.sleep(0.01)
    return int(pids.read_text())


def ends(process: int, seconds: float) -> bool:
    """Whether a process is gone after so many seconds at most."""
    end = time.monotonic() + seconds
    while Path(f"/proc/{process}").exists():
        if time.monotonic() > end:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_ends_the_run_at_once_and_leaves_its_results_alone(
    number: signal.Signals,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The first mutant is killed. The signal comes twice while the second is tried."""
    folder, pids, record = tmp_path / "temporary", tmp_path / "pids", tmp_path / "record.json"
    folder.mkdir()
    asked: list[object] = []
    sent: list[float] = []

    class Server(mutant_tests.Server):
        def _started(self, collected: bool) -> "subprocess.Popen[str]":
            return subprocess.Popen(
                [sys.executable, "-c", SERVER, str(pids)],
                cwd=ROOT,
                env={**os.environ, "TMPDIR": str(self.tree.parent)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )

        def swapped(self, *of: object) -> tuple[str, str]:
            asked.append(of)
            return self._outcome({"t": 0.1})[:2] if len(asked) > 1 else (KILLED, "t")

    def copied(root: Path, copy: Path) -> None:
        (copy / "tinyllama").mkdir(parents=True)

    def stop() -> None:
        try:
            named(pids)
        finally:
            sent.append(time.monotonic())
            for _ in range(2):
                os.kill(os.getpid(), number)
                time.sleep(0.05)  # else they were one

    some = [one for one in module_mutants.mutants("training.curve") if one.lines]
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(mutant_tests, "Server", Server)
    monkeypatch.setattr(mutant_tests, "copied", copied)
    monkeypatch.setattr(module_mutants, "mutants", lambda part: some)
    monkeypatch.setattr(module_mutants, "nearest", lambda *_: ["t"])
    monkeypatch.setattr(module_mutants, "chosen", lambda *_: {"t": 0.1})
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    asking = threading.Thread(target=stop)
    asking.start()
    try:
        status = module_mutants.main(["--sample", "3", "--jobs", "1", "--json", str(record)])
        took = time.monotonic() - sent[0]
        asking.join()
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    assert status == 130
    assert "stopped: 2 of the sample are left out" in capsys.readouterr().out
    assert [one.trial.outcome for one in mutant_record.read(record)] == [KILLED]
    assert ends(named(pids), 0.1), "the process that a test started"
    assert took < 30, "the test sleeps for 60 s"
    assert list(folder.iterdir()) == []


def test_a_server_whose_tool_is_killed_ends_what_its_tests_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    words = [sys.executable, "-c", SERVER, str(pids)]
    with subprocess.Popen(
        ["bash", "-c", '"$@" <&0 & wait', "", *words],  # else it would have no input
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        text=True,
    ) as tool:
        assert tool.stdin
        print('{"limit": 60}', file=tool.stdin, flush=True)
        left = named(pids)
        tool.kill()
        assert ends(left, 5)
