"""Two clocks: how long the device works on a call, and how long the host takes to enqueue it.

A pair of events around a call does not measure the device when the device was idle at the
first one: it then waits for the host's launches, and the pair measures those (a 4 us kernel
was read as 51 us, flashinfer-bench issue 195). So the device is kept busy first: a spin
kernel runs while the host enqueues the call between two events. The pair then measures the
device, and the host's own clock, read at the same two points, measures the enqueueing.

Each reading says whether the spin outlasted the enqueueing: whether the call was ``queued``. The
cost of the events themselves is subtracted. On a CPU, host and device are the
same, and so are the two readings. The clocks are bound when this is imported: code under test that
replaces `time.perf_counter` or `torch.cuda.Event.elapsed_time` does not change them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Protocol

import torch

_elapsed_ms = torch.cuda.Event.elapsed_time
OVERHEAD_READINGS, OVERHEAD_SPIN = 20, 1e-4
LONGEST_SPIN = 0.25  # seconds; a call whose enqueueing takes longer has no device time
# A spin that was long enough is shortened by this factor for the next reading. It is above a half,
# so that two alternating calls, one with twice the other's host time, are each read at the first
# try.
SHORTENED = 0.7


class Waited(Protocol):
    """What a clock of whole calls needs."""

    def now(self) -> float:
        """The host's clock in seconds."""

    def synchronize(self) -> None:
        """Wait until everything enqueued is done."""


class Queue(Waited, Protocol):
    """What a clock needs of a device. Tests use a simulated one."""

    def mark(self) -> Any:
        """Enqueue a mark and return it without waiting."""

    def spin(self, seconds: float) -> None:
        """Enqueue work of about that length."""

    def elapsed(self, earlier: Any, later: Any) -> float:
        """Seconds between two marks on the device; waits for the later one."""


class HostQueue:
    """The CPU: nothing is queued, a mark is a reading of the performance counter."""

    def now(self) -> float:
        return perf_counter()

    def mark(self) -> float:
        return perf_counter()

    def spin(self, seconds: float) -> None:
        """Does nothing: a CPU runs a call immediately, so there is nothing to delay."""

    def elapsed(self, earlier: float, later: float) -> float:
        return later - earlier

    def synchronize(self) -> None:
        pass


class DeviceQueue:
    """A GPU's current stream; a mark is an event."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cycles_per_second = 0.0

    def now(self) -> float:
        return perf_counter()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def spin(self, seconds: float) -> None:
        if not self._cycles_per_second:
            self._cycles_per_second = self._calibrate()
        self._sleep(int(seconds * self._cycles_per_second))

    def elapsed(self, earlier: torch.cuda.Event, later: torch.cuda.Event) -> float:
        later.synchronize()
        return _elapsed_ms(earlier, later) * 1e-3

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def _sleep(self, cycles: int) -> None:
        with torch.cuda.device(self.device):
            torch.cuda._sleep(cycles)

    def _calibrate(self) -> float:
        """Cycles of the counter that the spin kernel reads, per second."""
        cycles = 2_000_000
        self._sleep(cycles)
        start = self.mark()
        self._sleep(cycles)
        return cycles / self.elapsed(start, self.mark())


def queue_of(device: torch.device) -> Queue:
    return HostQueue() if device.type == "cpu" else DeviceQueue(device)


@dataclass(frozen=True)
class Reading:
    """Seconds of one call on both clocks. ``queued``: the device never waited for the host."""

    device: float
    host: float
    queued: bool


class Stamp:
    """A point in a queue, followed by a spin: ``later - earlier`` is device seconds.

    pytest-benchmark computes ``end - start`` of whatever its timer returns, so a `Clock` is
    such a timer. Each stamp enqueues a spin after itself; the last spin costs a moment and changes
    nothing.
    """

    __slots__ = ("ended", "host_ended", "host_marked", "host_started", "queue", "started")

    def __init__(self, queue: Queue, spin_seconds: float) -> None:
        self.queue = queue
        self.host_ended = queue.now()
        self.ended = queue.mark()
        self.host_marked = queue.now()
        if spin_seconds > 0:
            queue.spin(spin_seconds)
        self.started = queue.mark()
        self.host_started = queue.now()

    def since(self, earlier: "Stamp") -> Reading:
        """Both clocks between two stamps; waits for the device."""
        device = self.queue.elapsed(earlier.started, self.ended)
        spun = self.queue.elapsed(earlier.ended, earlier.started)
        # The device reached the mark before the spin after the host had enqueued it, so the spin
        # ended no earlier than this. A CPU runs calls immediately, so none is late.
        spinning_until = earlier.host_ended + spun
        queued = isinstance(self.queue, HostQueue) or self.host_marked <= spinning_until
        return Reading(device, self.host_ended - earlier.host_started, queued)

    def __sub__(self, earlier: "Stamp") -> float:
        return self.since(earlier).device


class Clock:
    """Stamps of one device: ``start = clock(); ...; reading = clock().since(start)``."""

    def __init__(
        self,
        queue: Queue,
        spin_seconds: float = 1e-4,
        longer: float = 2.0,
        shortened: float = SHORTENED,
    ) -> None:
        """longer: how many times as long as the last enqueueing the next spin is at least.
        shortened: it is at least this share of the last spin."""
        self.queue, self.longer, self.shortened = queue, longer, shortened
        self.spin_seconds = self._shortest = spin_seconds
        self._overhead: float | None = None

    @property
    def overhead(self) -> float:
        """Device seconds between two marks with nothing between them: about 2 us on a GPU.

        The minimum of several readings, so that no more is subtracted than marks cost. The spin
        need not outlast a call: with that of a call of 10 ms these readings took half a second.
        """
        if self._overhead is None:
            spin = max(self._shortest, OVERHEAD_SPIN)
            readings = []
            for _ in range(OVERHEAD_READINGS):
                self.queue.synchronize()
                start = Stamp(self.queue, spin)
                readings.append(Stamp(self.queue, spin).since(start))
            self._overhead = min((r.device for r in readings if r.queued), default=0.0)
        return self._overhead

    def __call__(self) -> Stamp:
        return Stamp(self.queue, self.spin_seconds)

    def read(
        self, call: Callable[[], object], before: Callable[[], object] | None = None
    ) -> Reading:
        """One queued reading of a call; ``before`` runs before each try, and is not measured.

        A reading whose spin was too short is repeated with a longer one; a spin that was much too
        long is shortened. There is no spin after the call: the next work on the device, even
        that of another process, would wait for it.
        Raises NotQueuedError when even the longest spin is too short: the call waits for the
        device.
        """
        while True:
            if before is not None:
                before()
            self.queue.synchronize()
            start = self()
            call()
            reading = Stamp(self.queue, 0.0).since(start)
            if reading.queued:
                needed = max(self._shortest, self.longer * reading.host)
                self.spin_seconds = min(
                    LONGEST_SPIN, max(needed, self.shortened * self.spin_seconds)
                )
                return replace(reading, device=max(0.0, reading.device - self.overhead))
            if self.spin_seconds >= LONGEST_SPIN:
                raise NotQueuedError(
                    f"enqueueing took {reading.host * 1e3:.1f} ms behind a spin of "
                    f"{self.spin_seconds * 1e3:.0f} ms: the call waits for the device, or "
                    "fills its queue"
                )
            self.spin_seconds = min(LONGEST_SPIN, max(2 * self.spin_seconds, 2 * reading.host))

    def all_work(self, calls: Callable[[], object], before: Callable[[], object]) -> float:
        """Seconds from the end of a spin, during which all calls are enqueued, until the device
        has nothing left to do: of work on other streams, too, and of what ends with the results.
        Work on a stream that waits for nothing runs during the spin, and counts beyond its length.

        before: runs before each try, and is not measured. A reading whose spin was too short is
        repeated with a longer one, up to the longest; what that cannot outlast contains the host's
        time.
        """
        while True:
            before()
            self.queue.synchronize()
            started, mark = self.queue.now(), self.queue.mark()
            self.queue.spin(self.spin_seconds)
            spun = self.queue.mark()
            calls()
            enqueued = self.queue.now()
            self.queue.synchronize()
            ended = self.queue.now()
            released = started + self.queue.elapsed(mark, spun)
            enough = isinstance(self.queue, HostQueue) or enqueued <= released
            if enough or self.spin_seconds >= LONGEST_SPIN:
                needed = max(self._shortest, self.longer * (enqueued - started))
                self.spin_seconds = min(
                    LONGEST_SPIN, max(needed, self.shortened * self.spin_seconds)
                )
                return ended - released
            longer = max(2 * self.spin_seconds, self.longer * (enqueued - started))
            self.spin_seconds = min(LONGEST_SPIN, longer)


class NotQueuedError(RuntimeError):
    """A call that cannot be enqueued ahead of the device, and so has no device time."""


def wall_seconds(call: Callable[[], object], queue: Waited) -> float:
    """Seconds from an idle device to an idle device: how long a user waits for one call."""
    queue.synchronize()
    start = queue.now()
    call()
    queue.synchronize()
    return queue.now() - start
