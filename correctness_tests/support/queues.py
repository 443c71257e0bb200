"""A queue of a device on which time is known."""

import random
from collections.abc import Callable

US = 1e-6
KERNEL, DELAY = 5 * US, 100 * US


class SimulatedQueue:
    """A device that does in order what a host asks for, and two clocks that nothing disturbs.

    launch: host seconds that a request costs. marking: device seconds that a mark costs.
    uneven: the cost of requests varies, and the device hears of each at some moment of it.
    """

    def __init__(
        self, launch: float = 1 * US, uneven: random.Random | None = None, marking: float = 0.0
    ) -> None:
        self.launch, self.uneven, self.marking = launch, uneven, marking
        self.host = 0.0
        self.free = 0.0  # when the device will have done all that was asked for
        self.spins: list[float] = []

    def enqueue(self, seconds: float) -> float:
        """Ask for work of some length; when the device will have done it."""
        queued_at, cost = self.host, self.launch
        if self.uneven is not None:
            cost *= self.uneven.uniform(0.1, 4)
            queued_at += self.uneven.choice((0.0, self.uneven.random(), 1.0)) * cost
        self.host += cost
        self.free = max(self.free, queued_at) + seconds
        return self.free

    def now(self) -> float:
        return self.host

    def mark(self) -> float:
        return self.enqueue(self.marking)

    def spin(self, seconds: float) -> None:
        self.spins.append(seconds)
        self.enqueue(seconds)

    def elapsed(self, earlier: float, later: float) -> float:
        self.host = max(self.host, later)
        return later - earlier

    def synchronize(self) -> None:
        self.host = max(self.host, self.free)

    def call(self, delay: float = DELAY, kernel: float = KERNEL) -> Callable[[], None]:
        """A call that keeps the host busy and then launches a kernel."""

        def call() -> None:
            self.host += delay
            self.enqueue(kernel)

        return call
