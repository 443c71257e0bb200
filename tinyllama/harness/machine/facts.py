"""The machine of a record: what its figures depend on besides code and versions."""

import os
import platform
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from tinyllama.harness.machine.device import device_name, memory_bytes
from tinyllama.harness.machine.sensors import NotToldError, Sensor, sensor

T = TypeVar("T")

BUSY_SHARE = 0.1  # of the last moments; a GPU that is busier than this is not idle


def describe(device: torch.device) -> dict[str, Any]:
    """Processor, memory, system; of a GPU also driver and power limit.

    A field that the GPU's sensor cannot read is absent; ``unavailable`` has its reason.
    """
    described: dict[str, Any] = {
        "processor": device_name(torch.device("cpu")),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_bytes(torch.device("cpu")),
        "system": f"{platform.system()} {platform.release()}",
    }
    if device.type == "cpu":
        return described
    gpu = sensor(device)
    unavailable = {}
    for field in ("driver", "power_limit_watts"):
        try:
            if isinstance(gpu, str):
                raise NotToldError(gpu)
            described[field] = getattr(gpu, field)()
        except NotToldError as error:
            unavailable[field] = str(error)
    return {**described, "unavailable": unavailable} if unavailable else described


def disturbance(device: torch.device) -> str | None:
    """Why nothing should be timed on a device now; None when no reason is known.

    Call it while nothing of one's own runs on the device. Only a GPU with a sensor has reasons.
    """
    gpu = sensor(device)
    if isinstance(gpu, str):
        return None
    pids: list[int] = []
    strangers = [pid for pid in reading_or(gpu.processes, pids) if not _in_our_group(pid)]
    if strangers:
        return f"other processes compute on the GPU: {', '.join(map(str, strangers))}"
    busy = busy_at_rest(gpu)
    if busy > BUSY_SHARE:
        return f"the GPU is {busy:.0%} busy with nothing of ours running"
    throttled = reading_or(gpu.throttled, None)
    return throttled and f"the GPU is throttled: {throttled}"


def reading_or(ask: Callable[[], T], default: T) -> T:
    """What a sensor answers; the default where it cannot tell."""
    try:
        return ask()
    except NotToldError:
        return default


def busy_at_rest(gpu: Sensor, tries: int = 6) -> float:
    """The busy share of a GPU that has 3 s to become idle: the share covers up to a second."""
    for _ in range(tries):
        share = reading_or(gpu.busy_share, 0.0)
        if share <= BUSY_SHARE:
            break
        time.sleep(0.5)
    return share


def _in_our_group(pid: int) -> bool:
    """Whether a process belongs to this one's group, as workers do, or to another namespace, of
    which nothing is known."""
    try:
        return os.getpgid(pid) == os.getpgrp()
    except ProcessLookupError:
        return True
