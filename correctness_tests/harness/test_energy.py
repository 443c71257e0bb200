"""Energy of a call by a counter, or else by power; and what disturbs a device that is timed.

A simulated sensor on a simulated clock stands for a GPU of 200 W: 200 J in each second.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from tinyllama.harness.machine import facts as machine
from tinyllama.harness.machine.sensors import NotToldError
from tinyllama.harness.measure import energy as energy_module
from tinyllama.harness.measure.energy import energy

CPU, GPU = torch.device("cpu"), torch.device("cuda")
WATTS = 200.0
CALL = 0.125  # seconds of one call on the simulated clock


class Clock:
    """Stands for the module ``time``; moves when a call says so."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def perf_counter(self) -> float:
        return self.seconds

    def call(self) -> None:
        self.seconds += CALL


class MadeUpSensor:
    """A GPU that draws constant power, with a counter that advances in steps of 20 ms.

    counts: the answers of the counter instead, one a question; None is NotToldError.
    """

    def __init__(self) -> None:
        self.clock = Clock()
        self.counts: Iterator[float | None] | None = None
        self.power: float | None = WATTS
        self.pids: list[int] = []
        self.shares: Iterator[float] = iter([])
        self.reason: str | None = None

    def energy_joules(self) -> float:
        if self.counts is None:
            return 5e6 + WATTS * (self.clock.seconds // 0.02) * 0.02
        return self.told(next(self.counts))

    def watts(self) -> float:
        return self.told(self.power)

    @staticmethod
    def told(value: float | None) -> float:
        if value is None:
            raise NotToldError("there is no power")
        return value

    def driver(self) -> str:
        return "1.0"

    def power_limit_watts(self) -> float:
        return 2 * WATTS

    def clocks_mhz(self) -> dict[str, int]:
        return {}

    def processes(self) -> list[int]:
        return self.pids

    def busy_share(self) -> float:
        return next(self.shares, 0.0)

    def throttled(self) -> str | None:
        return self.reason


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> MadeUpSensor:
    """The sensor of every device; and nothing sleeps."""
    made = MadeUpSensor()
    monkeypatch.setattr(energy_module, "time", made.clock)
    monkeypatch.setattr(machine, "sensor", lambda device: made)
    monkeypatch.setattr(machine, "time", SimpleNamespace(sleep=lambda seconds: None))
    return made


# -- energy -----------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [WATTS, 3 * WATTS, None])
def test_energy_of_a_call_by_the_counter(gpu: MadeUpSensor, power: float | None) -> None:
    """Whatever the power is: its samples miss what happens between them; the counter does not."""
    gpu.power = power
    found = energy(gpu.clock.call, CPU, gpu, seconds=10.0)
    assert found.source == "counter"
    assert found.watts == pytest.approx(WATTS, rel=0.01)
    assert found.joules == pytest.approx(WATTS * CALL, rel=0.01)


@pytest.mark.parametrize(
    "counts",
    [(9.0, 9.0), (None, None), (9.0, 1.0), (9.0, None), (None, 9.0)],
    ids=["frozen", "absent", "backwards", "lost", "found"],
)
def test_where_no_counter_advances_power_is_integrated(
    gpu: MadeUpSensor, counts: tuple[float | None, ...]
) -> None:
    gpu.counts = iter(counts)
    found = energy(gpu.clock.call, CPU, gpu, seconds=4.0)
    assert found.source == "power"
    assert found.watts == pytest.approx(WATTS)
    assert found.joules == pytest.approx(WATTS * CALL)


def test_without_counter_and_power_there_is_a_reason(gpu: MadeUpSensor) -> None:
    gpu.counts, gpu.power = iter([None, None]), None
    with pytest.raises(NotToldError, match="no counter of energy, no power: there is no power"):
        energy(gpu.clock.call, CPU, gpu)


# -- what disturbs ----------------------------------------------------------------------------


@pytest.fixture
def stranger() -> Iterator[int]:
    """A process of another group, as those of other users are."""
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(sleep, start_new_session=True) as process:
        yield process.pid
        process.kill()


def test_another_process_disturbs_and_ones_own_do_not(gpu: MadeUpSensor, stranger: int) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as worker:
        gpu.pids = [os.getpid(), worker.pid]
        assert machine.disturbance(GPU) is None
        gpu.pids.append(stranger)
        assert machine.disturbance(GPU) == f"other processes compute on the GPU: {stranger}"
        worker.communicate(b"\n")


def test_a_process_that_cannot_be_seen_from_here_says_nothing(gpu: MadeUpSensor) -> None:
    """In a container the ids are those of the host: that of this very process may be among them."""
    gpu.pids = [2**22 + 1]
    assert machine.disturbance(GPU) is None


def test_a_busy_gpu_disturbs_once_it_had_time_to_rest(
    gpu: MadeUpSensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.shares = iter([0.9, 0.6, 0.05])
    assert machine.disturbance(GPU) is None
    gpu.shares = iter([0.87] * 6)
    slept: list[float] = []
    monkeypatch.setattr(machine.time, "sleep", slept.append)
    assert machine.disturbance(GPU) == "the GPU is 87% busy with nothing of ours running"
    assert sum(slept) == 3.0


def test_a_throttled_gpu_disturbs(gpu: MadeUpSensor) -> None:
    gpu.reason = "power brake"
    assert machine.disturbance(GPU) == "the GPU is throttled: power brake"
