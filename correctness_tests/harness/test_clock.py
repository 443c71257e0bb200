"""The two clocks: device time is the device's, host time is the host's, or there is no reading.

The queue is simulated, on a host clock of its own: what is true of a call is then known.
"""

import contextlib
import random
import time
from typing import Any

import pytest
import torch

from correctness_tests.support.queues import DELAY, KERNEL, US, SimulatedQueue
from tinyllama.harness.measure.clock import (
    LONGEST_SPIN,
    OVERHEAD_READINGS,
    OVERHEAD_SPIN,
    Clock,
    HostQueue,
    NotQueuedError,
    queue_of,
    wall_seconds,
)

pytest_plugins = ["pytester"]


def test_a_pair_of_events_without_a_spin_reads_the_host() -> None:
    """The fault that the spin repairs: the idle device waits for the launch inside the pair."""
    queue = SimulatedQueue()
    start = queue.mark()
    queue.call()()
    assert queue.elapsed(start, queue.mark()) > DELAY
    clock = Clock(queue, spin_seconds=0.0)
    stamp = clock()
    queue.call()()
    reading = clock().since(stamp)
    assert not reading.queued
    assert reading.device > DELAY


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


def test_a_spin_that_is_shorter_than_asked_is_doubled_until_it_is_long_enough() -> None:
    """As where the device's clock rose since it was calibrated: here to ten times."""

    class Hurried(SimulatedQueue):
        def spin(self, seconds: float) -> None:
            super().spin(seconds / 10)

    queue = Hurried()
    clock = Clock(queue, spin_seconds=10 * US)
    assert clock.overhead == 0
    queue.spins.clear()
    host = clock.read(queue.call()).host
    asked = [10 * spin for spin in queue.spins]
    assert asked == pytest.approx([10 * US, *(2**times * host for times in (1, 2, 3, 4))])


@pytest.mark.parametrize("longer", [2.0, 1.4])
def test_a_spin_that_is_much_too_long_is_shortened_to_what_calls_need(longer: float) -> None:
    """One that was slow once does not make all that come after it wait."""
    queue = SimulatedQueue()
    clock = Clock(queue, longer=longer)
    assert clock.overhead == 0
    clock.read(queue.call(delay=400 * DELAY))
    long = clock.spin_seconds
    assert long > 400 * DELAY
    queue.spins.clear()
    for _ in range(40):
        clock.read(queue.call())
    assert len(queue.spins) == 40, "each at the first try"
    assert queue.spins == sorted(queue.spins, reverse=True)
    assert clock.spin_seconds == pytest.approx(longer * (DELAY + queue.launch))
    for _ in range(40):
        clock.read(queue.call(delay=0.0))
    assert clock.spin_seconds == 1e-4, "and never below what it began with"


def test_calls_of_which_one_takes_the_host_twice_as_long_are_read_at_the_first_try() -> None:
    queue = SimulatedQueue()
    clock = Clock(queue)
    calls = [queue.call(), queue.call(delay=2 * DELAY)]
    for call in 10 * calls:
        clock.read(call)
    queue.spins.clear()
    for call in 10 * calls:
        assert clock.read(call).queued
    assert len(queue.spins) == 20


def test_the_device_is_idle_when_a_reading_begins() -> None:
    """What ``before`` enqueues is done: a queue that fills up would hold the host back."""
    queue = SimulatedQueue()
    clock = Clock(queue, spin_seconds=1e-3)
    ahead: list[float] = []

    def call() -> None:
        ahead.append(queue.free - queue.host)
        queue.enqueue(KERNEL)

    clock.read(call, before=lambda: queue.enqueue(1.0))
    assert ahead == [pytest.approx(1e-3, rel=0.1)], "the spin alone"


def test_what_marks_cost_is_taken_off() -> None:
    queue = SimulatedQueue(marking=2 * US)
    clock = Clock(queue)
    start = clock()
    queue.call(delay=0.0)()
    assert clock() - start == pytest.approx(KERNEL + 2 * US), "a bare pair of stamps has it"
    assert clock.read(queue.call()).device == pytest.approx(KERNEL)


def test_what_marks_cost_is_read_behind_short_spins_though_calls_take_long() -> None:
    queue = SimulatedQueue(marking=2 * US)
    clock = Clock(queue)
    reading = clock.read(queue.call(delay=100 * DELAY))
    assert reading.device == pytest.approx(KERNEL)
    assert clock.spin_seconds > 100 * DELAY
    assert sum(queue.spins[-2 * OVERHEAD_READINGS :]) < 2 * OVERHEAD_READINGS * 2 * OVERHEAD_SPIN


def test_a_mark_that_was_slow_once_is_not_what_marks_cost() -> None:
    """More than they cost would be taken off each call."""
    queue = SimulatedQueue(marking=2 * US)
    marks = 0

    def mark() -> float:
        nonlocal marks
        marks += 1
        return queue.enqueue(50 * US if marks == 7 else 2 * US)  # each reading ends in its third

    queue.mark = mark  # type: ignore[method-assign]
    clock = Clock(queue)
    assert clock.overhead == pytest.approx(2 * US)
    assert marks == 4 * OVERHEAD_READINGS, "the slow one was read"


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


def test_a_clock_is_a_timer_of_pytest_benchmark(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # there it would time nothing
    pytester.makepyfile(
        """
        import pytest
        from correctness_tests.support.queues import KERNEL, SimulatedQueue
        from tinyllama.harness.measure.clock import Clock

        QUEUE = SimulatedQueue()
        CLOCK = Clock(QUEUE, spin_seconds=1e-3)

        @pytest.mark.benchmark(timer=CLOCK)
        def test_it(benchmark):
            benchmark.pedantic(QUEUE.call(), setup=QUEUE.synchronize, rounds=5)
            assert benchmark.stats.stats.data == pytest.approx([KERNEL] * 5)
        """
    )
    plugins = ("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:hypothesispytest")
    pytester.runpytest_inprocess(*plugins).assert_outcomes(passed=1)


def test_wall_time_is_from_idle_to_idle() -> None:
    """What was queued before is waited for outside, what the call queues inside."""
    queue = SimulatedQueue(launch=0.0)
    queue.enqueue(1.0)
    assert wall_seconds(queue.call(kernel=3 * DELAY), queue) == pytest.approx(4 * DELAY)


def test_a_gpus_queue_reads_marks_that_were_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that is simulated: it sleeps a cycle in a nanosecond, and a mark has a time once
    it was waited for."""
    queue = SimulatedQueue(launch=0.0)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.reached = not enable_timing

        def record(self, stream: str) -> None:
            assert stream == "the stream of cuda:1"
            self.at = queue.mark()

        def synchronize(self) -> None:
            self.reached = True

        def elapsed_time(self, later: "Event") -> float:  # in ms
            assert later.reached
            return (later.at - self.at) * 1e3

    waited: list[object] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", "the stream of {}".format)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: queue.enqueue(cycles * 1e-9))
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    gpu: Any = queue_of(torch.device("cuda:1"))
    gpu.now = queue.now
    start = gpu.mark()
    queue.enqueue(KERNEL)
    assert gpu.elapsed(start, gpu.mark()) == pytest.approx(KERNEL)
    start = gpu.mark()
    gpu.spin(1e-3)  # which asks once how long a cycle takes
    gpu.spin(1e-3)
    assert gpu.elapsed(start, gpu.mark()) == pytest.approx(2e-3 + 4e-3)
    assert Clock(gpu).read(queue.call()).device == pytest.approx(KERNEL)
    assert set(waited) == {torch.device("cuda:1")}


def test_on_a_cpu_the_two_clocks_are_one() -> None:
    queue = queue_of(torch.device("cpu"))
    assert isinstance(queue, HostQueue)
    reading = Clock(queue).read(lambda: time.sleep(2e-3))
    assert reading.queued
    assert min(reading.device, reading.host) >= 2e-3
