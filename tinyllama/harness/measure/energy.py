"""Energy of a call: joules and watts, over many repetitions."""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import scipy
import torch

from tinyllama.harness.machine.device import synchronize
from tinyllama.harness.machine.facts import known
from tinyllama.harness.machine.sensors import NotToldError, Sensor

SAMPLE_SECONDS = 0.02


@dataclass(frozen=True)
class Energy:
    """Joules of one call, mean watts, and the source of both: ``counter`` or ``power``."""

    joules: float
    watts: float
    source: str


def energy(
    call: Callable[[], object], device: torch.device, sensor: Sensor, seconds: float = 2.0
) -> Energy:
    """The mean energy of a call that is repeated for some seconds.

    Counters advance in steps of tens of milliseconds, too long for a single call. Where a GPU has
    no counter, or it does not advance, sampled power is integrated by trapezoids. Raises
    NotToldError where the sensor has neither.
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
    """The counter in joules; NaN where it cannot be read, so that no difference is above 0."""
    return known(sensor.energy_joules, math.nan)


class _PowerLog:
    """Samples of power from the start to the end of a block."""

    def __init__(self, sensor: Sensor) -> None:
        self.sensor = sensor
        self.samples: list[tuple[float, float]] = []
        self._error: NotToldError | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def __enter__(self) -> "_PowerLog":
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
            self._error = error

    def joules(self) -> float:
        """The integral of power over the samples; raises NotToldError when one is missing."""
        if self._error is not None:
            raise NotToldError(f"no counter of energy, no power: {self._error}")
        seconds, watts = zip(*self.samples, strict=True)
        return float(scipy.integrate.trapezoid(watts, seconds))
