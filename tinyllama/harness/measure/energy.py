"""Energy of a call: joules and watts, over many repetitions."""

import math
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

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
    no counter, or it does not advance, the mean of sampled power is taken. Raises NotToldError
    where the sensor has neither.
    """
    powers: list[float] = []
    over = threading.Event()

    def sample() -> None:
        while not over.wait(SAMPLE_SECONDS):
            powers.append(known(sensor.watts, math.nan))

    synchronize(device)
    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    before, start, calls = known(sensor.energy_joules, math.nan), time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        call()
        calls += 1
        if calls % 8 == 0:
            synchronize(device)
    synchronize(device)
    took = time.perf_counter() - start
    joules = known(sensor.energy_joules, math.nan) - before
    over.set()
    sampler.join()
    if joules > 0:  # and no NaN
        return Energy(joules / calls, joules / took, "counter")
    watts = statistics.fmean(powers or [sensor.watts()])
    if math.isnan(watts):
        raise NotToldError("the GPU tells neither its energy nor, all the time, its power")
    return Energy(watts * took / calls, watts, "power")
