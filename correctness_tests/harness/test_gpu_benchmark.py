"""`gpu_benchmark`: pytest-benchmark's fixture measures the device, and stays what it is."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from correctness_tests.support.queues import SimulatedQueue
from tinyllama.harness.measure.clock import NotQueuedError
from tinyllama.harness.plugins import gpu_benchmark
from tinyllama.harness.plugins.gpu_benchmark import _copied

pytest_plugins = ["pytester"]
PLUGIN = ("-p", gpu_benchmark.__name__, "-p", "no:xdist", "-p", "no:randomly")
# A device on which a kernel takes 5 us, behind 100 us of the host's, on a clock of its own.
SIMULATED = """
    from correctness_tests.support.queues import SimulatedQueue

    QUEUE = SimulatedQueue()
"""
CONFTEST = """
    import pytest
    from simulated import QUEUE

    @pytest.fixture(scope="session")
    def benchmark_queue():
        return QUEUE

    @pytest.fixture(scope="session")
    def benchmark_flush():
        return lambda: None
"""
KERNEL_US, HOST_US = 5.0, 100.0


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    # Under it pytest-benchmark would disable itself in the runs that these tests start.
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(simulated=SIMULATED)
    return pytester


def recorded(project: pytest.Pytester, *options: str) -> dict[str, dict[str, object]]:
    """The benchmarks in the JSON of a run, by the name of the test."""
    result = project.runpytest_subprocess(*PLUGIN, "--benchmark-json=found.json", *options)
    assert result.ret == 0, result.stdout.str()
    found = json.loads((project.path / "found.json").read_text())["benchmarks"]
    return {one["name"]: one for one in found}


def test_plain_benchmark_measures_the_host_and_this_one_the_device(
    project: pytest.Pytester,
) -> None:
    project.makepyfile(
        """
        import pytest
        from simulated import QUEUE

        def host_clock():
            return QUEUE.now()

        @pytest.mark.benchmark(timer=host_clock, min_rounds=5, max_time=0.001, warmup=False)
        def test_plain(benchmark):
            benchmark.pedantic(QUEUE.call(), rounds=5)

        def test_device(gpu_benchmark):
            gpu_benchmark(QUEUE.call())
        """
    )
    found = recorded(project, "--benchmark-only")
    plain, device = (found[name]["stats"]["median"] * 1e6 for name in ("test_plain", "test_device"))  # type: ignore[index]
    assert plain == pytest.approx(HOST_US, rel=0.05)
    assert device == pytest.approx(KERNEL_US, rel=0.05)


def test_it_is_the_real_fixture_and_each_round_has_inputs_of_its_own(
    project: pytest.Pytester,
) -> None:
    project.makepyfile(
        """
        import pytest
        import torch
        from pytest_benchmark.fixture import BenchmarkFixture
        from simulated import QUEUE

        @pytest.mark.benchmark(group="shapes")
        def test_inputs(gpu_benchmark):
            seen = []
            x = torch.zeros(4, 6)[:, ::2].requires_grad_()

            def call(x, *, pair):
                seen.append((x, pair["y"]))
                assert x.stride() == (6, 2) and x.requires_grad
                assert not x.detach().any() and not pair["y"].any()
                with torch.no_grad():
                    x += 1
                    pair["y"] += 1
                QUEUE.call()()
                return len(seen)

            assert isinstance(gpu_benchmark.fixture, BenchmarkFixture)
            gpu_benchmark.extra_info["shape"] = "4x3"
            with torch.no_grad():
                calls = gpu_benchmark(call, x, pair={"y": torch.zeros(2)})
            rounds = seen[-30:]
            assert len({one.data_ptr() for one, _ in rounds[-2:]} | {x.data_ptr()}) == 3
            assert calls == len(seen)
        """
    )
    found = recorded(project, "--benchmark-only")
    assert found["test_inputs"]["extra_info"] == {"shape": "4x3"}
    assert found["test_inputs"]["group"] == "shapes"
    assert found["test_inputs"]["stats"]["rounds"] == 30  # type: ignore[index]


def test_a_call_that_waits_for_the_device_is_an_error(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        from simulated import QUEUE

        def test_waiting(gpu_benchmark):
            gpu_benchmark(QUEUE.synchronize)
        """
    )
    result = project.runpytest_subprocess(*PLUGIN)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*NotQueuedError: enqueueing took*waits for the device*"])


class Pair(NamedTuple):
    x: torch.Tensor
    many: list[torch.Tensor]


def test_copies_have_the_structure_and_the_strides_of_what_is_given() -> None:
    x = torch.arange(6.0).view(2, 3).t().requires_grad_()
    plain = torch.ones(2)
    given = {"pair": Pair(x, [plain, x]), "some": (plain, 3), "text": "x"}
    copy = _copied(given)
    assert (list(copy), copy["text"]) == (list(given), "x")
    assert (type(copy["pair"]), type(copy["pair"].many)) == (Pair, list)
    assert type(copy["some"]) is tuple
    assert copy["some"][1] == 3
    assert len(copy["pair"].many) == 2
    both = [(x, copy["pair"].x), (x, copy["pair"].many[1]), (plain, copy["some"][0])]
    for own, other in both:
        assert torch.equal(own, other)
        assert own.data_ptr() != other.data_ptr()
        assert (own.stride(), own.requires_grad) == (other.stride(), other.requires_grad)


def test_the_device_is_kept_busy_four_times_as_long_as_the_slowest_call() -> None:
    timer = gpu_benchmark.DeviceTimer(SimulatedQueue())
    host = [30.0, 10.0, 50.0, 20.0, 40.0, 90.0]
    order: list[str] = []

    def read(call: Any, before: Any) -> Any:
        before()
        call()
        return SimpleNamespace(host=host[order.count("call") - 1])

    timer.clock.read = read  # type: ignore[method-assign, assignment]
    for spin, expected in ((0.0, 200.0), (500.0, 500.0)):
        order.clear()
        timer.clock.spin_seconds = spin
        timer.prepare(lambda: order.append("call"), lambda: order.append("before"))
        assert order == ["before", "call"] * 5
        assert timer.clock.spin_seconds == expected


@pytest.mark.parametrize(("device", "seconds"), [(7.0, 5.0), (2.0, 0.0), (1.0, 0.0)])
def test_between_two_points_are_the_devices_seconds_without_those_of_marking(
    device: float, seconds: float
) -> None:
    clock: Any = SimpleNamespace(overhead=2.0, queue=SimulatedQueue(), spin_seconds=0.0)
    first, last = gpu_benchmark.Point(clock), gpu_benchmark.Point(clock)
    reading = SimpleNamespace(device=device, host=0.00125, queued=True)
    asked: list[Any] = []

    def since(stamp: Any) -> Any:
        asked.append(stamp)
        return reading

    later: Any = SimpleNamespace(since=since)
    last.stamp = later
    assert last - first == seconds
    assert asked == [first.stamp]
    reading.queued = False
    with pytest.raises(NotQueuedError, match=r"enqueueing took 1\.25 ms"):
        last - first


@pytest.mark.parametrize("enabled", [False, True])
def test_each_call_has_arguments_of_its_own_and_cold_caches(
    enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    x = torch.zeros(2)
    copied = gpu_benchmark._copied

    def copying(value: Any) -> Any:
        if isinstance(value, tuple):  # positional arguments; tensors among them are copied, too
            order.append("copy")
        return copied(value)

    monkeypatch.setattr(gpu_benchmark, "_copied", copying)
    got: list[torch.Tensor] = []

    def prepare(call: Any, before: Any) -> None:
        for _ in range(2):
            before()
            call()

    def pedantic(function: Any, setup: Any, rounds: int, warmup_rounds: int) -> Any:
        assert (rounds, warmup_rounds) == (30, 5)
        args, kwargs = setup()
        return function(*args, **kwargs)

    def call(one: torch.Tensor, *, other: torch.Tensor) -> str:
        order.append("call")
        got.extend((one, other))
        return "result"

    queue = SimpleNamespace(synchronize=lambda: order.append("synchronize"))
    timer: Any = SimpleNamespace(clock=SimpleNamespace(queue=queue), prepare=prepare)
    fixture = SimpleNamespace(enabled=enabled, pedantic=pedantic, group="g")
    made = gpu_benchmark.GpuBenchmark(fixture, timer, lambda: order.append("flush"))
    assert made.group == "g"
    assert made(call, x, other=x) == "result"
    calls = 3 if enabled else 1
    assert order == ["copy", "flush", "synchronize", "call"] * calls
    assert len({one.data_ptr() for one in (x, *got)}) == 1 + 2 * calls


def test_no_private_attribute_of_the_plugin_is_used() -> None:
    root = Path(__file__).parents[2]
    files = [
        path
        for folder in ("tinyllama", "perf_tests", "correctness_tests", "tools")
        for path in (root / folder).rglob("*.py")
    ]
    assert root / "tinyllama/bench/table.py" in files
    private = re.compile(r"\b(benchmark|fixture)\._[a-z]")
    assert not [str(path) for path in files if private.search(path.read_text())]


@pytest.mark.slow("three runs of pytest in processes of their own, with files of pytest-benchmark")
def test_saving_and_comparing_work_as_documented_upstream(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import os
        from simulated import QUEUE

        def test_device(gpu_benchmark):
            gpu_benchmark(QUEUE.call(kernel=float(os.environ["KERNEL"])))
        """
    )
    for kernel, options, status in (
        ("5e-6", ["--benchmark-save=first"], 0),
        ("5e-6", ["--benchmark-compare=0001", "--benchmark-compare-fail=median:10%"], 0),
        ("9e-6", ["--benchmark-compare=0001", "--benchmark-compare-fail=median:10%"], 1),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KERNEL", kernel)
            result = project.runpytest_subprocess(*PLUGIN, *options)
        assert result.ret == status, result.stdout.str()
    assert "Performance has regressed" in result.stdout.str() + result.stderr.str()
