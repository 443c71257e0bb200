"""The two clocks on a GPU, where what is true is known from a kernel that spins.

The same as `test_clock.py` has of a simulated queue. What is held to seconds needs the GPU to
itself (`own_gpu`).
"""

import statistics
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from correctness_tests.support.queues import DELAY, KERNEL, US
from tinyllama.harness.measure.clock import Clock, DeviceQueue, NotQueuedError

pytestmark = pytest.mark.gpu


@pytest.fixture
def queue(device: torch.device) -> Iterator[DeviceQueue]:
    """The queue of a GPU whose clocks have left their idle state."""
    if device.type == "cpu":
        pytest.skip("a CPU queues nothing: test_clock.py has a simulated queue")
    with torch.cuda.device(device):
        end = time.perf_counter() + 0.3
        while time.perf_counter() < end:
            torch.cuda._sleep(1_000_000)
            torch.cuda.synchronize()
        yield DeviceQueue(device)


def busy_wait(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def replayed_seconds(launch: Callable[[], None], queue: DeviceQueue, count: int = 1000) -> float:
    """Seconds of one of many launches in a captured graph, where no host is in between."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            launch()
    graph.replay()
    start = queue.mark()
    graph.replay()
    return queue.elapsed(start, queue.mark()) / count


@pytest.fixture
def short(own_gpu: None, queue: DeviceQueue) -> tuple[Callable[[], None], float]:
    """A kernel of about 5 us, and its seconds as a graph of a thousand of them tells."""
    cycles = 50_000_000
    queue.synchronize()
    start = queue.mark()
    torch.cuda._sleep(cycles)
    rate = cycles / queue.elapsed(start, queue.mark())

    def kernel() -> None:
        torch.cuda._sleep(int(KERNEL * rate))

    return kernel, replayed_seconds(kernel, queue)


def test_a_gpu_reads_both_clocks(queue: DeviceQueue, short: tuple) -> None:
    kernel, seconds = short
    assert seconds == pytest.approx(KERNEL, abs=2 * US), "the kernel itself is not of 5 us"

    def call() -> None:
        busy_wait(DELAY)
        kernel()

    clock = Clock(queue)
    readings = [clock.read(call) for _ in range(15)]
    device = statistics.median(reading.device for reading in readings)
    host = statistics.median(reading.host for reading in readings)
    assert device == pytest.approx(seconds, rel=0.25, abs=2 * US)
    assert host == pytest.approx(DELAY, rel=0.25)

    unspun = Clock(queue, spin_seconds=0.0)
    queue.synchronize()
    start = unspun()
    call()
    reading = unspun().since(start)
    assert not reading.queued
    assert reading.device > DELAY / 2, "without the spin the pair of events reads the host"


def test_a_gpu_call_that_reads_a_value_back_is_refused(queue: DeviceQueue) -> None:
    value = torch.ones(8, device=queue.device)
    with pytest.raises(NotQueuedError):
        Clock(queue).read(lambda: value.sum().item())
