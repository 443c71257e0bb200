"""A process for each contender: what happens in one stays in it, and comes back as an answer."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from correctness_tests.support.commands import ENVIRONMENT, ROOT, python
from tinyllama.harness.machine.worker import Worker, WorkerError, all_ended, end_all

THING = "correctness_tests.support.worker_objects:Thing"
HOSTILE = (
    "cnt\nsystem\n(S'false'\ntR.",  # a pickle
    '["ok", {"of": "subprocess:Popen", "are": [["false"]]}, "", []]',
    "[]",
)


def worker(name: str = "it", **settings: Any) -> Worker:
    plain = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "", "PYTHONFAULTHANDLER": ""}
    process = Worker(name, cwd=ROOT, env=plain, **settings)
    process.make("thing", THING)
    return process


@pytest.fixture(scope="module")
def shared() -> Iterator[Worker]:
    """One that must survive every specification."""
    with worker("shared") as process:
        yield process


def runs(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def ends(pid: int, seconds: float = 20.0) -> bool:
    """Whether a process ends within some time."""
    end = time.monotonic() + seconds
    while runs(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not runs(pid)


def test_an_exception_arrives_with_message_and_traceback(shared: Worker) -> None:
    with pytest.raises(WorkerError) as caught:
        shared.call("thing", "raises", "the first line\nand the second")
    assert str(caught.value) == "ValueError: the first line"
    assert "in raises" in caught.value.details
    assert "and the second" in caught.value.details
    assert caught.value.raised(ValueError)
    assert caught.value.raised(Exception)
    assert not caught.value.raised(TypeError)
    with pytest.raises(WorkerError, match="RuntimeError: no such thing"):
        shared.make("none", THING, fails=True)
    with pytest.raises(WorkerError, match="ModuleNotFoundError"):
        shared.make("none", "no_such_module:Thing")
    with pytest.raises(WorkerError, match="AttributeError") as caught:
        shared.call("thing", "no_such_method")
    assert not caught.value.raised(ValueError)
    assert isinstance(shared.call("thing", "pid"), int), "the worker goes on"


@pytest.mark.long
def test_an_answer_that_is_none_of_ours_is_an_error_and_runs_nothing() -> None:
    for text in HOSTILE:
        with worker("hostile") as hostile, pytest.raises(WorkerError) as caught:
            hostile.call("thing", "answers", text)
        assert "the answer of hostile cannot be read: " in str(caught.value)


def test_what_is_printed_does_not_reach_the_answers(shared: Worker) -> None:
    for text in ("plain", "\x00\xff" * 100, "x" * 100_000):
        assert shared.call("thing", "prints", text) == text
    assert isinstance(shared.call("thing", "pid"), int)


@pytest.mark.parametrize(("how", "status"), [("exit", 7), ("abort", -6), ("leave", 0)])
def test_a_process_that_dies_leaves_its_status_and_last_words(
    shared: Worker, how: str, status: int
) -> None:
    with worker("doomed") as doomed:
        for _ in range(2):  # and says so from then on
            with pytest.raises(WorkerError) as caught:
                doomed.call("thing", "dies", how)
            assert str(caught.value) == f"the process of doomed ended with status {status}"
            assert f"last words before {how}" in caught.value.details
        assert "in dies" in caught.value.details or how != "abort", "the stack of a crash"
    assert isinstance(shared.call("thing", "pid"), int), "others go on"


def test_a_call_that_does_not_end_is_ended(shared: Worker) -> None:
    with worker("slow") as slow:
        pid = slow.call("thing", "pid")
        start = time.monotonic()
        with pytest.raises(WorkerError, match="slow did not answer call in 1 s"):
            slow.call("thing", "sleeps", 600.0, timeout=0.6)
        assert ends(pid)
        with pytest.raises(WorkerError, match="ended with status -9"):
            slow.call("thing", "pid")
    assert time.monotonic() - start < 15
    assert isinstance(shared.call("thing", "pid"), int)


def state(pid: int) -> str:
    """Linux's letter for it: T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.long
def test_a_stopped_worker_does_nothing_until_it_is_asked_again() -> None:
    """Nor do its threads; and the time in which it is stopped is in no time limit."""
    with worker("waits", stoppable=True) as waits:
        pid = waits.call("thing", "pid")
        waits.call("thing", "works", 2.0)  # in a thread, which goes on after the answer
        waits.stop()
        end = time.monotonic() + 20
        while state(pid) != "T" and time.monotonic() < end:
            time.sleep(0.01)
        before = Path(f"/proc/{pid}/stat").read_text().split()[13:15]
        time.sleep(0.5)
        assert Path(f"/proc/{pid}/stat").read_text().split()[13:15] == before
        assert waits.call("thing", "pid", timeout=20) == pid
        assert state(pid) != "T"
        waits.stop()
    assert ends(pid), "and it ends where it is closed"


def test_workers_share_nothing_and_leave_nothing(shared: Worker) -> None:
    """Objects, processes and caches are a worker's own; all are gone when it is closed."""
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    with worker("another") as another:
        another.call("thing", "set", "another's")
        shared.call("thing", "set", "shared's")
        assert another.call("thing", "get") == "another's"
        pids = [process.call("thing", "pid") for process in (shared, another)]
        assert len({*pids, os.getpid()}) == 3
        caches = [side.call("thing", "environment", *names) for side in (shared, another)]
        assert len({*caches[0], *caches[1], *map(os.environ.get, names)} - {None}) >= 4
        folders = [Path(cache) for cache in caches[1]]
        for cache in folders:
            assert not cache.exists(), "it starts empty"
            cache.mkdir()
            (cache / "kernel").write_text("compiled")
    assert ends(pids[1])
    assert not any(cache.parent.exists() for cache in folders)
    assert runs(pids[0])
    with pytest.raises(WorkerError, match="ended with status 0"):
        another.call("thing", "get")


@pytest.mark.long
@pytest.mark.parametrize("how", ["in a call", "stopped"])
def test_a_worker_ends_with_the_process_that_started_it(tmp_path: Path, how: str) -> None:
    """Even when that one is killed, and closes nothing."""
    then = {
        "in a call": "threading.Thread(target=one.call, args=('thing', 'sleeps', 600.0)).start()",
        "stopped": "one.stop()",
    }[how]
    code = (
        f"import os, threading, time\nfrom {__name__} import worker\n"
        f"one = worker('one', stoppable={how == 'stopped'})\n"
        f"print(one.call('thing', 'pid'), flush=True)\n{then}\n"
        "time.sleep(0.3)\nos.kill(os.getpid(), 9)\n"
    )
    parent = python("-c", code, env={**ENVIRONMENT, "TMPDIR": str(tmp_path)})
    assert parent.returncode == -9, parent.stderr
    assert ends(int(parent.stdout))


@pytest.mark.long
def test_all_are_ended_while_one_is_asked_and_none_is_started_until_they_may() -> None:
    with Worker("slow") as worker:
        ending = threading.Timer(0.5, end_all)
        ending.start()
        began = time.monotonic()
        try:
            with pytest.raises(WorkerError, match="ended with status -9"):
                worker.make("never", f"{__name__}:Sleeper")
            assert time.monotonic() - began < 20
            assert all_ended()
            with pytest.raises(WorkerError, match="is not started"):
                Worker("late")
        finally:
            ending.join()
            end_all(False)
    Worker("again").close()


class Sleeper:
    """Takes long to be made."""

    def __init__(self) -> None:
        time.sleep(60)
