"""The two clocks: device time is the device's, host time is the host's, or there is no reading.

The queue is simulated, on a host clock of its own: what is true of a call is then known.
"""

import random
import time

import pytest
import torch

from correctness_tests.support.queues import DELAY, KERNEL, US, SimulatedQueue
from tinyllama.harness.measure.clock import (
    LONGEST_SPIN,
    Clock,
    HostQueue,
    NotQueuedError,
    queue_of,
    wall_seconds,
)


def test_a_spin_that_is_too_short_is_lengthened_and_the_reading_repeated() -> None:
    """``before`` runs ahead of each try and is not in the reading."""
    queue = SimulatedQueue()
    tries: list[int] = []

    def before() -> None:
        tries.append(len(queue.spins))
        queue.host += 1.0
        queue.enqueue(1.0)

    clock = Clock(queue, spin_seconds=10 * US)
    assert clock.overhead == 0, "marks cost nothing here, and are not asked about below"
    queue.spins.clear()
    reading = clock.read(queue.call(), before)
    assert reading.queued
    assert reading.device == pytest.approx(KERNEL)
    assert reading.host == pytest.approx(DELAY + queue.launch)
    assert len(tries) >= 2
    assert tries == list(range(len(queue.spins))), "one spin a try, ahead of the call"
    assert queue.spins[0] == 10 * US
    assert clock.spin_seconds > DELAY, "the length that sufficed is kept for the next reading"
    before_next = len(tries)
    clock.read(queue.call(), before)
    assert len(tries) == before_next + 1


def test_what_marks_cost_is_taken_off() -> None:
    queue = SimulatedQueue(marking=2 * US)
    clock = Clock(queue)
    start = clock()
    queue.call(delay=0.0)()
    assert clock() - start == pytest.approx(KERNEL + 2 * US), "a bare pair of stamps has it"
    assert clock.read(queue.call()).device == pytest.approx(KERNEL)


def test_a_call_that_waits_for_the_device_has_no_device_time() -> None:
    """Nor has one whose host is slower than the longest spin."""
    queue = SimulatedQueue()

    def call() -> None:
        queue.enqueue(KERNEL)
        queue.synchronize()
        queue.enqueue(KERNEL)

    with pytest.raises(NotQueuedError, match="the call waits for the device"):
        Clock(queue).read(call)
    assert max(queue.spins) == LONGEST_SPIN
    assert len(queue.spins) < 40, "spins grow quickly"
    with pytest.raises(NotQueuedError):
        Clock(queue).read(queue.call(delay=2 * LONGEST_SPIN))


def test_queued_is_never_claimed_of_a_device_that_waited() -> None:
    """Around the length at which the spin just suffices, where launches cost as much as work."""
    draw = random.Random(0)
    claimed = 0
    for _ in range(5000):
        queue = SimulatedQueue(draw.uniform(1, 20) * US, uneven=draw)
        clock = Clock(queue, spin_seconds=draw.uniform(80, 180) * US)
        start = clock()
        queue.call()()
        reading = clock().since(start)
        claimed += reading.queued
        if reading.queued:
            assert reading.device == pytest.approx(KERNEL)
    assert 500 < claimed < 4500, "both outcomes were seen"


def test_wall_time_is_from_idle_to_idle() -> None:
    """What was queued before is waited for outside, what the call queues inside."""
    queue = SimulatedQueue(launch=0.0)
    queue.enqueue(1.0)
    assert wall_seconds(queue.call(kernel=3 * DELAY), queue) == pytest.approx(4 * DELAY)


def test_on_a_cpu_the_two_clocks_are_one() -> None:
    queue = queue_of(torch.device("cpu"))
    assert isinstance(queue, HostQueue)
    reading = Clock(queue).read(lambda: time.sleep(2e-3))
    assert reading.queued
    assert min(reading.device, reading.host) >= 2e-3
