"""The machine of a record: what decides its figures beside code and versions."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from tinyllama.harness.machine.device import device_name
from tinyllama.harness.machine.sensors import NotToldError, Sensor, sensor

T = TypeVar("T")

BUSY_SHARE = 0.1  # of the last moments, before anything of ours runs


def describe(device: torch.device) -> dict[str, Any]:
    """Processor, memory, system; of a GPU also driver, power limit and clocks.

    What its sensor does not tell is absent, and ``unavailable`` says why, by field.
    """
    found: dict[str, Any] = {
        "processor": device_name(torch.device("cpu")),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
    }
    if device.type == "cpu":
        return found
    gpu = sensor(device)
    unavailable = {}
    for field in ("driver", "power_limit_watts", "clocks_mhz"):
        try:
            if isinstance(gpu, str):
                raise NotToldError(gpu)
            found[field] = getattr(gpu, field)()
        except NotToldError as error:
            unavailable[field] = str(error)
    return {**found, **({"unavailable": unavailable} if unavailable else {})}


def disturbance(device: torch.device) -> str | None:
    """Why nothing should be timed on a device now; None when nothing is known against it.

    Call it while nothing of one's own runs on the device. Only a GPU with a sensor can tell.
    """
    gpu = sensor(device)
    return None if isinstance(gpu, str) else _disturbance_of(gpu)


def _disturbance_of(gpu: Sensor) -> str | None:
    nobody: list[int] = []
    strangers = [pid for pid in _known(gpu.processes, nobody) if not _ours(pid)]
    if strangers:
        return f"other processes compute on the GPU: {', '.join(map(str, strangers))}"
    busy = _busy_at_rest(gpu)
    if busy > BUSY_SHARE:
        return f"the GPU is {busy:.0%} busy with nothing of ours running"
    throttled = _known(gpu.throttled, None)
    return throttled and f"the GPU is throttled: {throttled}"


def _known(ask: Callable[[], T], otherwise: T) -> T:
    try:
        return ask()
    except NotToldError:
        return otherwise


def _busy_at_rest(gpu: Sensor, tries: int = 6) -> float:
    """The busy share of a GPU that has 3 s to fall idle: it looks back over up to a second."""
    for _ in range(tries):
        share = _known(gpu.busy_share, 0.0)
        if share <= BUSY_SHARE:
            break
        time.sleep(0.5)
    return share


def _ours(pid: int) -> bool:
    """Whether a process belongs to this one's group, as workers do, or cannot be seen at all."""
    try:
        return os.getpgid(pid) == os.getpgrp()
    except ProcessLookupError:
        return True  # of another namespace: nothing can be said of it
