"""Energy of a call: joules and watts, over many repetitions."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tinyllama.harness.machine.device import synchronize
from tinyllama.harness.machine.sensors import NotToldError, Sensor


@dataclass(frozen=True)
class Energy:
    """Joules of one call, and the mean watts of the GPU."""

    joules: float
    watts: float


def energy(
    call: Callable[[], object], device: torch.device, sensor: Sensor, seconds: float = 2.0
) -> Energy:
    """The mean energy of a call that is repeated for some seconds, by the GPU's counter of energy:
    it advances in steps of tens of milliseconds, too long for a single call.

    Raises NotToldError where the GPU has no such counter, or it does not advance.
    """
    synchronize(device)
    before, start, calls = sensor.energy_joules(), time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        call()
        calls += 1
        if calls % 8 == 0:
            synchronize(device)
    synchronize(device)
    took = time.perf_counter() - start
    joules = sensor.energy_joules() - before
    if joules <= 0:
        raise NotToldError(f"the GPU's counter of energy did not advance in {took:.1f} s")
    return Energy(joules / calls, joules / took)
