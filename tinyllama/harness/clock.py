"""Elapsed time of work on a device.

On a GPU a stamp is an event on the current stream, and the difference of two stamps waits
for the second one: what is measured is the device, and no reading is taken before the work
is done. On the CPU a stamp is a reading of the performance counter.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from scipy.stats import quantile_test

from tinyllama.harness.device import default_device, synchronize


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


def device_timer() -> Stamp:
    """A stamp of the default device, for pytest-benchmark's ``timer``."""
    return Stamp(default_device())


def interleaved(
    targets: Mapping[str, Callable[[], object]], device: torch.device, rounds: int
) -> dict[str, list[float]]:
    """Seconds of each target in each round, in the order A B C, C B A, A B C, ...

    Clocks, temperature and other work on the machine drift; what is compared must be
    measured in turn, and each must come first as often as last.
    """
    seconds: dict[str, list[float]] = {name: [] for name in targets}
    timer = Timer(device)
    for index in range(rounds):
        names = list(targets)[:: 1 if index % 2 == 0 else -1]
        for name in names:
            synchronize(device)
            start = timer()
            targets[name]()
            seconds[name].append(timer() - start)
    return seconds


@dataclass(frozen=True)
class Ratio:
    """How many times longer one thing takes than another: median, and its 99% interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def ratio(slow: Sequence[float], fast: Sequence[float]) -> Ratio:
    """The ratio of two interleaved series, round by round.

    The interval is that of the median by order statistics, which assumes no distribution.
    """
    each = [s / f for s, f in zip(slow, fast, strict=True)]
    found = quantile_test(each, q=statistics.median(each), p=0.5)
    interval = found.confidence_interval(confidence_level=0.99)
    return Ratio(statistics.median(each), float(interval.low), float(interval.high))
