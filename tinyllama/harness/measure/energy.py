"""Energy of a call, repeated until a counter can tell: joules and watts."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tinyllama.harness.machine.device import synchronize
from tinyllama.harness.machine.sensors import NotToldError, Sensor

SAMPLE_SECONDS = 0.02


@dataclass(frozen=True)
class Energy:
    """Joules of one call, mean watts meanwhile, and whether a ``counter`` or ``power`` told."""

    joules: float
    watts: float
    source: str


def energy(
    call: Callable[[], object], device: torch.device, sensor: Sensor, seconds: float = 2.0
) -> Energy:
    """Repeat a call for some seconds and share out what the device used.

    Counters advance in steps of tens of milliseconds, so a single call tells nothing. Where
    there is none, or it does not advance, sampled power is integrated (trapezoids). Raises
    NotToldError where the sensor knows neither.
    """
    synchronize(device)
    with _PowerLog(sensor) as log:
        before, start, calls = _counter(sensor), time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            call()
            calls += 1
            if calls % 8 == 0:
                synchronize(device)
        synchronize(device)
        took, counted = time.perf_counter() - start, _counter(sensor) - before
    if counted > 0:
        return Energy(counted / calls, counted / took, "counter")
    joules = log.joules()
    return Energy(joules / calls, joules / took, "power")


def _counter(sensor: Sensor) -> float:
    """The counter; NaN where it cannot be read, which no comparison takes for an advance."""
    try:
        return sensor.energy_joules()
    except NotToldError:
        return math.nan


class _PowerLog:
    """Samples of power while a block runs, from its start to its end."""

    def __init__(self, sensor: Sensor) -> None:
        self.sensor = sensor
        self.samples: list[tuple[float, float]] = []
        self._silent: NotToldError | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def __enter__(self) -> _PowerLog:
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._sample()

    def _repeat(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            self._sample()

    def _sample(self) -> None:
        try:
            self.samples.append((time.perf_counter(), self.sensor.watts()))
        except NotToldError as error:
            self._silent = error

    def joules(self) -> float:
        """The integral of power over the samples; raises NotToldError when one is missing."""
        if self._silent is not None:
            raise NotToldError(f"no counter of energy, no power: {self._silent}")
        pairs = zip(self.samples, self.samples[1:], strict=False)
        return sum((t1 - t0) * (w0 + w1) / 2 for (t0, w0), (t1, w1) in pairs)
