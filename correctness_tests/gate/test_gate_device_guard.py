"""One gate at a time on a device, and whatever disturbs it is said, our own workers excepted."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tinyllama.harness.gate.device_guard import BusyError, DeviceGuard, device_lock
from tinyllama.harness.machine import facts as machine

CPU, GPU, OTHER = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")
UUIDS = {0: "8e4b1d52-1111-2222-3333-444455556666", 1: "../../8e4b"}
ELSEWHERE = 2**22 + 1  # more than any process of here


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, and two GPUs."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda d: SimpleNamespace(uuid=UUIDS[d.index])
    )
    return tmp_path


# -- the lock ---------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [CPU, GPU, OTHER])
def test_a_locked_device_is_refused(folder: Path, device: torch.device) -> None:
    with device_lock(device, 0):
        said = f"{device} was held by another gate for 0.1 s: wait"
        with pytest.raises(BusyError, match=said), device_lock(device, 0.1):
            pytest.fail("held twice")
    with device_lock(device, 0):
        pass


def test_a_lock_is_of_one_gpu_whatever_its_number(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with device_lock(GPU, 0):
        with device_lock(CPU, 0), device_lock(OTHER, 0):
            pass
        monkeypatch.setitem(UUIDS, 1, UUIDS[0])
        with pytest.raises(BusyError), device_lock(OTHER, 0):
            pytest.fail("the same GPU under another number")


def test_a_device_that_cannot_be_locked_is_not_timed(folder: Path) -> None:
    (folder / "tinyllama-gate-cpu.lock").mkdir()
    said = r"cannot be locked.*let every user write .*cpu\.lock"
    with pytest.raises(BusyError, match=said), device_lock(CPU, 0):
        pytest.fail("it is not locked")


# -- what disturbs ----------------------------------------------------------------------------


class MadeUpSensor:
    """A GPU at rest, alone."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self.share = 0.0
        self.reason: str | None = None

    def processes(self) -> list[int]:
        return self.pids

    def busy_share(self) -> float:
        return self.share

    def throttled(self) -> str | None:
        return self.reason


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(machine.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    return MadeUpSensor()


SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def orphan(*, own_group: bool) -> Iterator[int]:
    """A process whose parent has ended."""
    code = "import subprocess as s, sys\n"
    code += f"print(s.Popen(sys.argv[1:], stdout=s.DEVNULL, start_new_session={own_group}).pid)"
    start = [sys.executable, "-c", code, *SLEEP]
    pid = int(subprocess.run(start, stdout=subprocess.PIPE, check=True).stdout)
    yield pid
    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def stranger() -> Iterator[int]:
    yield from orphan(own_group=True)


@pytest.fixture
def neighbour() -> Iterator[int]:
    """No descendant, but of this group."""
    yield from orphan(own_group=False)


@pytest.fixture
def worker() -> Iterator[int]:
    """A worker in a group of its own."""
    with subprocess.Popen(SLEEP, start_new_session=True) as process:
        yield process.pid
        process.kill()


def looks(guard: DeviceGuard, *pids: int) -> list[str | None]:
    return [guard.before(), guard.during(pids), guard.after()]


BUSY = "the GPU is 87% busy with nothing of ours running"


@pytest.mark.parametrize(
    ("share", "reason", "said"),
    [
        (0.0, None, [None] * 3),
        (0.0, "power brake", ["the GPU is throttled: power brake"] * 3),
        (0.87, None, [BUSY, None, BUSY]),
    ],
)
def test_a_gpu_is_quiet_or_throttled_or_busy_where_nothing_of_ours_runs(
    gpu: Any, share: float, reason: str | None, said: list[str | None]
) -> None:
    gpu.share, gpu.reason = share, reason
    assert looks(DeviceGuard(GPU, gpu)) == said
    assert DeviceGuard(GPU, gpu).unreadable is None


@pytest.mark.long
def test_workers_are_ours_and_a_stranger_is_not(
    gpu: Any, worker: int, neighbour: int, stranger: int
) -> None:
    gpu.pids = [os.getpid(), worker, neighbour]
    assert looks(DeviceGuard(GPU, gpu)) == [None] * 3, "named or not"
    assert looks(DeviceGuard(GPU, gpu), worker, neighbour) == [None] * 3
    gpu.pids.append(stranger)
    said = f"other processes compute on the GPU: {stranger}"
    assert looks(DeviceGuard(GPU, gpu), worker) == [said] * 3


def test_a_guard_in_a_container_tolerates_as_many_processes_as_are_ours(
    gpu: Any, worker: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container the ids are those of the host: those of our own workers may be among them."""
    guard = DeviceGuard(GPU, gpu)
    said = "processes outside this container compute on the GPU: {} in all"
    gpu.pids = [ELSEWHERE]
    assert looks(guard) == [said.format(1)] * 3
    assert guard.during([worker]) is None
    gpu.pids = [ELSEWHERE, worker]
    assert guard.during([worker]) == said.format(1), "our worker was seen: this is another"
    gpu.pids = [ELSEWHERE, ELSEWHERE + 1, 0]
    assert guard.during([worker, worker + 1]) == said.format(3)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert guard.during([worker, worker + 1]) is None
    gpu.pids = [ELSEWHERE]
    assert looks(guard) == [None] * 3, "this very process"


def test_a_cpu_is_busy_where_more_runs_than_it_has_processors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "getloadavg", lambda: (4.0, 9.0, 9.0))
    assert looks(DeviceGuard(CPU)) == [None] * 3
    assert DeviceGuard(CPU).unreadable is None
    monkeypatch.setattr(os, "getloadavg", lambda: (4.3, 0.0, 0.0))
    said = "the load is 4.3 on 4 processors: other work runs here"
    assert looks(DeviceGuard(CPU)) == [said, None, None], "later it is ours"
