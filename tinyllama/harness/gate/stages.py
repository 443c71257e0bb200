"""The seconds of each stage of a gate, from the start of the command that a user gave."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

_BEGAN = "TINYLLAMA_GATE_BEGAN"  # for the judge: when the command that started it began


class Stages(dict[str, float]):
    """Seconds by the name of a stage. Its parts are named ``stage: part`` and count in it too."""

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Add the seconds of a `with` block."""
        began = time.monotonic()
        try:
            yield
        finally:
            self[name] = self.get(name, 0.0) + time.monotonic() - began


def began() -> float:
    """When the command began, by `time.monotonic`; this process, if it is the command."""
    try:
        return float(os.environ[_BEGAN])
    except (KeyError, ValueError):
        return time.monotonic() - age()


def handed_on() -> dict[str, str]:
    """For the environment of a judge: when this command began."""
    return {_BEGAN: str(began())}


def age() -> float:
    """Seconds since this process was started (proc(5))."""
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
