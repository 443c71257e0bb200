"""The fixture `gpu_benchmark`: pytest-benchmark's own, with a clock that measures the device.

    def test_norm(gpu_benchmark):
        gpu_benchmark(my_kernel, x, weight)

Plain ``benchmark(my_kernel, x)`` measures how long the host takes to enqueue the call, and runs
it again and again on the same inputs in warm caches. Here every round has fresh copies of the
inputs, cold caches and a device that waits until the call is enqueued, and the time is the
device's. Statistics, table, JSON, ``--benchmark-save`` and ``--benchmark-compare`` are
pytest-benchmark's. On a CPU, where nothing is enqueued, the time is that of the call.

In a project of one's own: ``pytest -p tinyllama.harness.plugins.gpu_benchmark``.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tinyllama.harness.machine.device import default_device
from tinyllama.harness.measure.cache import flush_of
from tinyllama.harness.measure.clock import Clock, NotQueuedError, Queue, Stamp, queue_of

ROUNDS, WARM_UP = 30, 5  # calls
MARGIN = 4.0  # times as long as the host took at most the device is kept busy


class DeviceTimer:
    """A timer of pytest-benchmark: the difference of two of its points is seconds of the device."""

    def __init__(self, queue: Queue) -> None:
        self.clock = Clock(queue)

    def __call__(self) -> "Point":
        return Point(self.clock)

    def prepare(self, call: Callable[[], object], before: Callable[[], object]) -> None:
        """Warm up, and see how long the device must be kept busy while a call is enqueued.
        ``before`` runs before each call, and is not measured.

        Raises NotQueuedError for a call that waits for the device: it has no device time.
        """
        slowest = max(self.clock.read(call, before).host for _ in range(WARM_UP))
        self.clock.spin_seconds = max(self.clock.spin_seconds, MARGIN * slowest)


class Point:
    """A point in the device's queue; pytest-benchmark subtracts two of them."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.stamp = clock, Stamp(clock.queue, clock.spin_seconds)

    def __sub__(self, earlier: "Point") -> float:
        reading = self.stamp.since(earlier.stamp)
        if not reading.queued:
            raise NotQueuedError(
                f"enqueueing took {reading.host * 1e3:.2f} ms, and the device had waited: the time "
                "would be the host's. Run it again, with nothing else on this machine"
            )
        return max(0.0, reading.device - self.clock.overhead)


class GpuBenchmark:
    """pytest-benchmark's fixture as ``fixture``; what is not here is its own, ``extra_info`` and
    ``group`` among it."""

    def __init__(self, fixture: Any, timer: DeviceTimer, flush: Callable[[], object]) -> None:
        self.fixture, self.timer, self.flush = fixture, timer, flush

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fixture, name)

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Time a call; its result in the last round. Tensors among the arguments, also in lists,
        tuples and dicts, are copied for every round."""

        def fresh() -> tuple[tuple[Any, ...], dict[str, Any]]:
            copies = _copied(args), _copied(kwargs)
            self.flush()
            self.timer.clock.queue.synchronize()
            return copies

        inputs = args, kwargs

        def renew() -> None:
            nonlocal inputs
            inputs = fresh()

        if self.fixture.enabled:
            self.timer.prepare(lambda: function(*inputs[0], **inputs[1]), renew)
        return self.fixture.pedantic(function, setup=fresh, rounds=ROUNDS, warmup_rounds=WARM_UP)


def _copied(value: Any) -> Any:
    """The same structure with copies of its tensors, which keep strides and ``requires_grad``."""
    if isinstance(value, torch.Tensor):
        copy = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )
        return copy.copy_(value.detach()).requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: _copied(element) for key, element in value.items()}
    if isinstance(value, (list, tuple)):
        copies = [_copied(element) for element in value]
        named = isinstance(value, tuple) and hasattr(value, "_fields")
        return type(value)(*copies) if named else type(value)(copies)
    return value


@pytest.fixture(scope="session")
def benchmark_queue() -> Queue:
    """The queue of the device that `gpu_benchmark` measures; a conftest may name another one."""
    return queue_of(default_device())


@pytest.fixture(scope="session")
def benchmark_flush() -> Callable[[], object]:
    """What evicts the contents of that device's caches."""
    return flush_of(default_device())


@pytest.fixture
def benchmark_timer(request: pytest.FixtureRequest, benchmark_queue: Queue) -> DeviceTimer:
    """The timer of this test, named in its marker before pytest-benchmark's fixture reads it."""
    timer = DeviceTimer(benchmark_queue)
    marker = request.node.get_closest_marker("benchmark")
    options = {**(marker.kwargs if marker else {}), "timer": timer}
    request.node.add_marker(pytest.mark.benchmark(**options), append=False)
    return timer


@pytest.fixture
def gpu_benchmark(
    benchmark_timer: DeviceTimer, benchmark: Any, benchmark_flush: Callable[[], object]
) -> GpuBenchmark:
    """Time a call on the device: ``gpu_benchmark(kernel, x)``."""
    return GpuBenchmark(benchmark, benchmark_timer, benchmark_flush)
