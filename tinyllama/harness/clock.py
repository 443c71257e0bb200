"""Elapsed time of work on a device.

On a GPU a stamp is an event on the current stream, and the difference of two stamps waits
for the second one: what is measured is the device, and no reading is taken before the work
is done. On the CPU a stamp is a reading of the performance counter.
"""

from __future__ import annotations

import time

import torch


class Stamp:
    """A point in a device's queue. ``later - earlier`` waits and returns seconds.

    pytest-benchmark computes ``end - start`` of whatever its timer returns, so
    `Timer.__call__` serves as its timer and the recorded statistics are device seconds.
    """

    __slots__ = ("event", "seconds")

    def __init__(self, device: torch.device) -> None:
        self.event: torch.cuda.Event | None = None
        self.seconds = 0.0
        if device.type == "cpu":
            self.seconds = time.perf_counter()
        else:
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()

    def __sub__(self, earlier: Stamp) -> float:
        if self.event is None or earlier.event is None:
            return self.seconds - earlier.seconds
        self.event.synchronize()
        return earlier.event.elapsed_time(self.event) * 1e-3


class Timer:
    """Stamps of one device: ``timer = Timer(device); start = timer(); ...; timer() - start``."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self) -> Stamp:
        return Stamp(self.device)
