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

from tinyllama.harness.gate import watch
from tinyllama.harness.gate.watch import BusyError, Watch, device_lock
from tinyllama.harness.machine import facts as machine
from tinyllama.harness.machine.sensors import NotToldError

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
def test_a_device_is_held_by_one_and_the_holder_is_named(
    folder: Path, device: torch.device
) -> None:
    with device_lock(device, 0):
        mine = f"{device} was held by process {os.getpid()} for 0.1 s: wait"
        with pytest.raises(BusyError, match=mine), device_lock(device, 0.1):
            pytest.fail("held twice")
        (lock,) = folder.glob("*.lock")
        assert lock.name.startswith("tinyllama-gate-")
    with device_lock(device, 0):
        pass


def test_devices_are_locked_apart_and_by_themselves_not_their_number(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with device_lock(GPU, 0):
        with device_lock(CPU, 0), device_lock(OTHER, 0):
            pass
        monkeypatch.setitem(UUIDS, 1, UUIDS[0])
        with pytest.raises(BusyError), device_lock(OTHER, 0):
            pytest.fail("the same GPU under another number")


@pytest.mark.parametrize(
    ("device", "told", "name"),
    [
        ("cpu", None, "cpu"),
        ("cuda:1", {"uuid": "a/b", "pci_bus_id": 7}, "a-b"),
        ("cuda:1", {"pci_bus_id": 7}, "bus-7"),
        ("cuda:1", {}, "bus-1"),
        ("cuda", {}, "bus-0"),
    ],
)
def test_a_gpu_is_named_by_what_it_says_of_itself(
    device: str, told: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number, as the last resort, is 0 where none is given."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**told))
    assert watch.identity(torch.device(device)) == name


def test_a_lock_ends_with_the_error_of_who_holds_it(folder: Path) -> None:
    with pytest.raises(KeyError), device_lock(CPU, 0):
        raise KeyError
    with device_lock(CPU, 0):
        pass


@pytest.fixture
def holder(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that holds the CPU, until it is told to let go."""
    code = "import sys, time, filelock\nwith filelock.FileLock(sys.argv[1]):\n"
    code += " print(flush=True)\n input()\n time.sleep(0.3)"
    with subprocess.Popen(
        [sys.executable, "-c", code, folder / "tinyllama-gate-cpu.lock"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (folder / "tinyllama-gate-cpu.pid").write_text(str(process.pid))
        yield process
        process.kill()


def test_another_process_is_waited_for(holder: subprocess.Popen[bytes]) -> None:
    with pytest.raises(BusyError, match=f"process {holder.pid} "), device_lock(CPU, 0):
        pytest.fail("held twice")
    assert holder.stdin is not None
    holder.stdin.write(b"\n")
    holder.stdin.flush()
    with device_lock(CPU, 20):
        pass


def test_a_lock_goes_with_the_process_that_held_it(holder: subprocess.Popen[bytes]) -> None:
    holder.kill()
    holder.wait()
    with device_lock(CPU, 5):
        pass


def test_a_worker_that_outlives_its_gate_does_not_hold_the_lock(folder: Path) -> None:
    with device_lock(CPU, 0):
        worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with device_lock(CPU, 0):
        worker.communicate(b"\n")


@pytest.mark.parametrize("noted", ["", "no number", str(ELSEWHERE), "0", "-1"])
def test_a_holder_that_is_not_known_is_another_process(
    holder: subprocess.Popen[bytes], folder: Path, noted: str
) -> None:
    """A process that is gone held the device before, and does not any more."""
    (folder / "tinyllama-gate-cpu.pid").write_text(noted)
    with pytest.raises(BusyError, match="held by another process"), device_lock(CPU, 0):
        pytest.fail("held twice")


def test_other_users_may_lock_the_device_too(folder: Path) -> None:
    mask = os.umask(0o077)
    try:
        with device_lock(CPU, 0):
            files = list(folder.iterdir())
    finally:
        os.umask(mask)
    assert {path.suffix for path in files} == {".lock", ".pid"}
    assert [path.stat().st_mode & 0o777 for path in files] == [0o666, 0o666]


def test_a_device_that_cannot_be_locked_is_not_timed(folder: Path) -> None:
    (folder / "tinyllama-gate-cpu.lock").mkdir()
    said = r"cannot be locked.*let every user write .*cpu\.lock"
    with pytest.raises(BusyError, match=said), device_lock(CPU, 0):
        pytest.fail("it is not locked")


def test_a_link_in_the_place_of_the_note_is_not_written_through(folder: Path) -> None:
    (folder / "precious").write_text("mine")
    (folder / "tinyllama-gate-cpu.pid").symlink_to("precious")
    with device_lock(CPU, 0):
        pass
    assert (folder / "precious").read_text() == "mine"


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


def looks(one: Watch, *pids: int) -> list[str | None]:
    return [one.before(), one.during(pids), one.after()]


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
    assert looks(Watch(GPU, gpu)) == said
    assert Watch(GPU, gpu).unreadable is None


def test_workers_are_ours_and_a_stranger_is_not(
    gpu: Any, worker: int, neighbour: int, stranger: int
) -> None:
    gpu.pids = [os.getpid(), worker, neighbour]
    assert looks(Watch(GPU, gpu)) == [None] * 3, "named or not"
    assert looks(Watch(GPU, gpu), worker, neighbour) == [None] * 3
    gpu.pids.append(stranger)
    said = f"other processes compute on the GPU: {stranger}"
    assert looks(Watch(GPU, gpu), worker) == [said] * 3


def test_a_worker_that_is_named_is_ours_wherever_it_comes_from(gpu: Any, stranger: int) -> None:
    one = Watch(GPU, gpu)
    gpu.pids = [stranger]
    assert one.during([]) is not None
    assert one.during([stranger]) is None


def test_a_worker_that_ended_a_moment_ago_is_no_stranger(gpu: Any) -> None:
    one = Watch(GPU, gpu)
    with subprocess.Popen(SLEEP) as ended:
        gpu.pids = [ended.pid]
        assert one.during([ended.pid]) is None
        ended.kill()
    assert one.during([]) is None
    assert Watch(GPU, gpu).during([]) is not None


def test_of_processes_that_cannot_be_seen_no_more_are_there_than_of_ours(
    gpu: Any, worker: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container the ids are those of the host: those of our own workers may be among them."""
    one = Watch(GPU, gpu)
    said = "processes outside this container compute on the GPU: {} in all"
    gpu.pids = [ELSEWHERE]
    assert looks(one) == [said.format(1)] * 3
    assert one.during([worker]) is None
    gpu.pids = [ELSEWHERE, worker]
    assert one.during([worker]) == said.format(1), "our worker was seen: this is another"
    gpu.pids = [ELSEWHERE, ELSEWHERE + 1, 0]
    assert one.during([worker, worker + 1]) == said.format(3)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert one.during([worker, worker + 1]) is None
    gpu.pids = [ELSEWHERE]
    assert looks(one) == [None] * 3, "this very process"


@pytest.mark.parametrize("question", ["processes", "busy_share", "throttled"])
def test_what_is_not_told_is_no_reason_but_the_rest_is_asked(
    gpu: Any, stranger: int, question: str
) -> None:
    def silent() -> None:
        raise NotToldError("not supported")

    setattr(gpu, question, silent)
    assert looks(Watch(GPU, gpu)) == [None] * 3
    gpu.pids, gpu.reason = [stranger], "power brake"
    said = looks(Watch(GPU, gpu))
    assert None not in said
    assert all("throttled" in str(text) for text in said) is (question == "processes")


def test_a_gpu_without_a_sensor_says_that_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "sensor", lambda device: "no sensor (pip install it)")
    one = Watch(GPU)
    assert looks(one) == [None] * 3
    assert one.unreadable == "no sensor (pip install it)"


def test_a_sensor_that_tells_nothing_is_none(gpu: Any) -> None:
    def silent() -> None:
        raise NotToldError("not supported")

    gpu.processes = gpu.busy_share = silent
    assert Watch(GPU, gpu).unreadable is None
    gpu.throttled = silent
    assert "reads neither processes" in str(Watch(GPU, gpu).unreadable)


def test_a_cpu_is_busy_where_more_runs_than_it_has_processors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "getloadavg", lambda: (4.0, 9.0, 9.0))
    assert looks(Watch(CPU)) == [None] * 3
    assert Watch(CPU).unreadable is None
    monkeypatch.setattr(os, "getloadavg", lambda: (4.3, 0.0, 0.0))
    said = "the load is 4.3 on 4 processors: other work runs here"
    assert looks(Watch(CPU)) == [said, None, None], "later it is ours"


def test_a_load_that_moves_is_one_reason_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    loads, told = iter([9.5, 9.25, 8.0, 1.0]), list[str]()
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "getloadavg", lambda: (next(loads), 0.0, 0.0))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert Watch(CPU).wait_until_idle(60, told.append) is None
    assert told == ["the load is 9.5 on 4 processors: other work runs here"] * 3


def test_a_machine_that_does_not_say_its_processors_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    for load, busy in ((0.9, False), (1.5, True)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert (Watch(torch.device("cpu")).before() is not None) is busy


@pytest.mark.parametrize(
    ("pid", "ours"),
    [(10, True), (30, True), (40, True), (50, False), (60, False), (1, False), (0, False)],
)
def test_a_process_is_ours_if_one_of_its_ancestors_is(
    pid: int, ours: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the fourth field of its status; the second may hold anything."""
    parents = {10: 1, 20: 10, 30: 20, 40: 30, 50: 1, 60: 999, 1: 0}
    for one, parent in parents.items():
        (tmp_path / str(one)).mkdir()
        (tmp_path / f"{one}/stat").write_text(f"{one} (a) b (c) S {parent} 77 77 0")
    monkeypatch.setattr(watch, "Path", lambda path: tmp_path / path.removeprefix("/proc/"))
    monkeypatch.setattr(os, "getpid", lambda: 10)
    assert watch._descends(pid) is ours
