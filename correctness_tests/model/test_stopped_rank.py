"""A rank whose process no longer runs ends the job within its limit, by an error that names it."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from correctness_tests.support.stopped_rank import signalled
from tinyllama.training import checkpoint
from tinyllama.training.answering import LOOKS, SILENT, Answering, parent

TINY = ("--hidden-dim", "32", "--num-layers", "2", "--num-heads", "4", "--batch-size", "2")
LIMIT = 4  # seconds
COPIES = ("--reduce", "copies", "--seq-len", "64")
BY = {
    "gloo": ("--device", "cpu", "--seq-len", "8"),
    **{f"{tier} by copies": ("--tier", tier, *COPIES) for tier in ("v3", "v4")},
}


@pytest.mark.slow("a job of two processes, and seconds of waiting")
@pytest.mark.parametrize(
    "name", ["gloo", *(pytest.param(name, marks=pytest.mark.gpu) for name in BY if name != "gloo")]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_ends_the_job_and_is_named(name: str, rank: int, tmp_path: Path) -> None:
    if name != "gloo" and torch.cuda.device_count() < 2:
        pytest.skip("ranks on GPUs need two")
    ended = signalled(tmp_path, signal.SIGSTOP, LIMIT, 300, *TINY, *BY[name], rank=rank)
    assert ended.status == 1
    assert f"error: rank {rank} has not answered for 3 s (seen by rank {1 - rank})" in ended.printed
    assert "SilentRankError" in ended.printed.partition("Root Cause")[2]
    assert ended.seconds < 25, "torchrun waits 30 s for a process that SIGTERM does not end"
    assert not ended.left
    kept = checkpoint.load(ended.checkpoint)
    assert kept.checksummed
    assert kept.steps >= 3


def each_of(count: int) -> list[Answering]:
    store = dist.HashStore()
    ranks = [Answering(store, rank, count, seconds=LOOKS * 1000.0) for rank in range(count)]
    for one in ranks:
        one.start()  # its thread waits for a thousand seconds
    return ranks


def test_a_rank_is_silent_after_so_many_looks_in_turn_without_an_answer() -> None:
    first, second, third = ranks = each_of(3)
    for look in range(1, 1 + SILENT):
        second.look(look)
        assert first.look(look) == ([2] if look == SILENT else [])
    third.look(1)
    second.look(SILENT + 1)
    assert first.look(SILENT + 1) == []
    for look in range(SILENT + 2, 2 * SILENT + 1):
        assert first.look(look) == []
    assert first.look(2 * SILENT + 1) == [1, 2]
    for one in ranks:
        one.stop(left=False)


def test_a_rank_that_left_in_order_is_not_silent_and_one_that_failed_is() -> None:
    first, second, third = each_of(3)
    second.stop(left=True)
    third.stop(left=False)
    assert [first.look(look) for look in range(1, 1 + SILENT)][-1] == [2]
    first.stop(left=True)
    assert not any(thread._thread.is_alive() for thread in (first, second, third))


def test_only_a_silent_process_of_the_same_launcher_is_killed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(os, "kill", lambda *given: killed.append(given))
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    store = dist.HashStore()
    answering = Answering(store, 0, 3, seconds=20.0)

    def end(host: str) -> None:
        for rank, process in ((1, child.pid), (2, os.getppid())):
            store.set(f"process of rank {rank}", f"{host} {process}")
        with pytest.raises(SystemExit) as ended:
            answering._end([1, 2])
        assert ended.value.code == 1
        assert "ranks [1, 2] have not answered" in (tmp_path / "error.json").read_text()

    try:
        assert parent(child.pid) == os.getpid()
        end(socket.gethostname())
        assert killed == []
        monkeypatch.setattr(os, "getppid", os.getpid)
        end("another-host")
        assert killed == []
        end(socket.gethostname())
        assert killed == [(child.pid, signal.SIGKILL)]
    finally:
        child.communicate(b"\n")
    assert parent(child.pid) is None
    assert all(1 < seconds < 2 for seconds in slept), "torchrun compares whole seconds"
    assert len(slept) == 3
    error = "ranks [1, 2] have not answered for 15 s (seen by rank 0): a process that was stopped"
    assert error in capsys.readouterr().err
    assert error in (tmp_path / "error.json").read_text()
