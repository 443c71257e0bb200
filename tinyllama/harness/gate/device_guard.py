"""A lock for one gate at a time on a device, and what disturbs it: other work, throttled clocks."""

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from tinyllama.harness.machine.facts import BUSY_SHARE, busy_at_rest, reading_or
from tinyllama.harness.machine.sensors import NotToldError, Sensor, sensor

WAIT = 180.0  # seconds for another gate to end, and then for the machine to become idle


class BusyError(RuntimeError):
    """A device that is disturbed, held by another gate, or cannot be locked."""


@contextlib.contextmanager
def device_lock(
    device: torch.device, timeout: float, waiting: Callable[[str], None] = lambda reason: None
) -> Iterator[None]:
    """Hold a device against other gates of all users; wait up to ``timeout`` seconds for it.
    waiting: is told what it waits for.

    The lock is a file in the folder for temporary files, named after the GPU itself and not after
    its number. It ends with the process that holds it.
    """
    path = Path(tempfile.gettempdir()) / f"tinyllama-gate-{identity(device)}.lock"
    lock = FileLock(path, mode=0o666)
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            waiting(f"{device} is held by another gate ({path})")
            lock.acquire(timeout=timeout)
    except Timeout as error:
        raise BusyError(
            f"{device} was held by another gate for {timeout:g} s: wait until it has ended (it "
            f"holds {path})"
        ) from error
    except OSError as error:
        raise BusyError(
            f"{device} cannot be locked: {error}: let every user write {path}, or delete it"
        ) from error
    try:
        yield
    finally:
        lock.release()


def identity(device: torch.device) -> str:
    """A name of the GPU itself, whatever its number among the visible ones."""
    if device.type == "cpu":
        return "cpu"
    properties = torch.cuda.get_device_properties(device)
    bus = getattr(properties, "pci_bus_id", device.index or 0)
    return re.sub(r"[^\w-]", "-", str(getattr(properties, "uuid", f"bus-{bus}")))


_FIGURES = re.compile(r"\d+(\.\d+)?")


class DeviceGuard:
    """A device that this gate holds from its first use on, in a `with` statement, and what disturbs
    it before, between and after the blocks.

    unreadable: why the GPU's load cannot be read, else None. unwatched: use it all the same. gpu:
    replaces its own sensor. waiting: is told whom or what it waits for.
    """

    def __init__(
        self,
        device: torch.device,
        gpu: Sensor | None = None,
        *,
        unwatched: bool = False,
        waiting: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.device, self.unwatched, self.waiting = device, unwatched, waiting
        reader = gpu or sensor(device)
        self.gpu = None if isinstance(reader, str) else reader
        self.unreadable = _why_unreadable(reader) if device.type != "cpu" else None
        self.holds = False
        self._idle, self._lock = False, contextlib.ExitStack()
        self._workers: set[int] = set()

    def __enter__(self) -> "DeviceGuard":
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def hold(self) -> None:
        """Hold the device against other gates, once it is free. Raises BusyError."""
        if self.holds:
            return
        if self.unreadable and not self.unwatched:
            raise BusyError(
                f"load and throttling cannot be read: {self.unreadable}; fix that, or add "
                "--unwatched"
            )
        self._lock.enter_context(device_lock(self.device, WAIT, self.waiting))
        self.holds = True

    def wait_until_idle(self) -> None:
        """Hold the device, and wait once until nothing disturbs it. The wait shows the first figure
        of a reason, so that a log need not repeat it. Raises BusyError."""
        self.hold()
        end, last_reason = time.monotonic() + WAIT, ""
        while not self._idle:
            reason = self.before()
            if reason and time.monotonic() >= end:
                raise BusyError(reason)
            if reason:
                if _FIGURES.sub("", reason) != _FIGURES.sub("", last_reason):
                    last_reason = reason
                self.waiting(last_reason)
                time.sleep(min(5.0, WAIT))
            self._idle = not reason

    def before(self) -> str | None:
        """Why nothing should be timed now; call it while nothing of ours runs on the device."""
        if self.device.type != "cpu":
            return self.after()
        load, processors = os.getloadavg()[0], os.cpu_count() or 1  # both of the whole machine
        busy = f"the load is {load:.1f} on {processors} processors: other work runs here"
        return busy if load > processors else None

    def during(self, pids: Sequence[int] = ()) -> str | None:
        """What disturbs the device while our workers with these pids may be on it."""
        self._workers.update(pids)
        if self.gpu is None:
            return None
        return self._strangers(self.gpu, pids) or self._throttled(self.gpu)

    def after(self) -> str | None:
        """What disturbs a GPU after our last work on it."""
        if self.gpu is None:
            return None
        if strangers := self._strangers(self.gpu, ()):
            return strangers
        busy = busy_at_rest(self.gpu)
        if busy > BUSY_SHARE:
            return f"the GPU is {busy:.0%} busy with nothing of ours running"
        return self._throttled(self.gpu)

    def _strangers(self, gpu: Sensor, pids: Sequence[int]) -> str | None:
        """Processes on the GPU that are not ours.

        In a container the sensor may list ids of the host, which name no process here. Then no
        more ids may be listed than we have processes.
        """
        nobody: list[int] = []
        listed = reading_or(gpu.processes, nobody)
        unseen = [p for p in listed if _group(p) is None and p not in self._workers]
        strangers = [p for p in listed if p not in unseen and not self._ours(p)]
        if strangers:
            return f"other processes compute on the GPU: {', '.join(map(str, strangers))}"
        ours = [*pids, *([os.getpid()] if torch.cuda.is_initialized() else [])]
        if len(unseen) > len([pid for pid in ours if pid not in listed]):
            return f"processes outside this container compute on the GPU: {len(unseen)} in all"
        return None

    def _ours(self, pid: int) -> bool:
        return pid in self._workers or _group(pid) == os.getpgrp() or _descends(pid)

    def _throttled(self, gpu: Sensor) -> str | None:
        throttled = reading_or(gpu.throttled, None)
        return throttled and f"the GPU is throttled: {throttled}"


def _why_unreadable(sensor: Sensor | str) -> str | None:
    """Why a sensor can read nothing that disturbs its GPU; None where it reads something."""
    if isinstance(sensor, str):
        return sensor
    for ask in (sensor.processes, sensor.busy_share, sensor.throttled):
        with contextlib.suppress(NotToldError):
            ask()
            return None
    return "its sensor reads neither processes, nor the load, nor throttling"


def _group(pid: int) -> int | None:
    """The group of a process; None for one that is not visible here."""
    try:
        return os.getpgid(pid) if pid > 0 else None
    except OSError:
        return None


def _descends(pid: int) -> bool:
    """Whether a process was started by this one, or by one of its descendants."""
    while pid not in (0, os.getpid()):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return False
        pid = int(stat.rpartition(")")[2].split()[1])
    return pid != 0
