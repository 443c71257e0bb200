"""`gpu_benchmark`: pytest-benchmark's fixture measures the device, and stays what it is."""

import json

import pytest

from tinyllama.harness.plugins import gpu_benchmark

pytest_plugins = ["pytester"]
PLUGIN = ("-p", gpu_benchmark.__name__, "-p", "no:xdist", "-p", "no:randomly")
# A device on which a kernel takes 5 us, behind 100 us of the host's, on a clock of its own.
SIMULATED = """
    from correctness_tests.support.queues import SimulatedQueue

    QUEUE = SimulatedQueue()
"""
CONFTEST = """
    import os
    import pytest
    from simulated import QUEUE

    os.environ.pop("PYTEST_XDIST_WORKER", None)  # under it pytest-benchmark disables itself

    @pytest.fixture(scope="session")
    def benchmark_queue():
        return QUEUE

    @pytest.fixture(scope="session")
    def benchmark_flush():
        return lambda: None
"""
KERNEL_US, HOST_US = 5.0, 100.0
BENCHMARKS = """
    import pytest
    import torch
    from pytest_benchmark.fixture import BenchmarkFixture
    from simulated import QUEUE

    def host_clock():
        return QUEUE.now()

    @pytest.mark.benchmark(timer=host_clock, min_rounds=5, max_time=0.001, warmup=False)
    def test_host(benchmark):
        benchmark.pedantic(QUEUE.call(), rounds=5)

    def test_device(gpu_benchmark):
        gpu_benchmark(QUEUE.call())

    def test_waiting(gpu_benchmark):
        gpu_benchmark(QUEUE.synchronize)

    @pytest.mark.benchmark(group="shapes")
    def test_inputs(gpu_benchmark):
        inputs = []
        x = torch.zeros(4, 6)[:, ::2].requires_grad_()

        def call(x, *, pair):
            inputs.append((x, pair["y"]))
            assert x.stride() == (6, 2) and x.requires_grad
            assert not x.detach().any() and not pair["y"].any()
            with torch.no_grad():
                x += 1
                pair["y"] += 1
            QUEUE.call()()
            return len(inputs)

        assert isinstance(gpu_benchmark.fixture, BenchmarkFixture)
        gpu_benchmark.extra_info["shape"] = "4x3"
        with torch.no_grad():
            calls = gpu_benchmark(call, x, pair={"y": torch.zeros(2)})
        assert len({x.data_ptr() for x, _ in inputs[-2:]} | {x.data_ptr()}) == 3
        assert calls == len(inputs)
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(simulated=SIMULATED)
    return pytester


@pytest.mark.long
def test_fixture_measures_the_device_on_fresh_inputs_and_refuses_a_call_that_waits(
    project: pytest.Pytester,
) -> None:
    """Plain ``benchmark`` measures the host."""
    project.makepyfile(BENCHMARKS)
    result = project.runpytest_subprocess(
        *PLUGIN, "--benchmark-json=result.json", "--benchmark-only"
    )
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(["*NotQueuedError: enqueueing took*waits for the device*"])
    stored = json.loads((project.path / "result.json").read_text())["benchmarks"]
    benchmarks = {benchmark["name"]: benchmark for benchmark in stored}
    host, device = (
        benchmarks[name]["stats"]["median"] * 1e6 for name in ("test_host", "test_device")
    )
    assert host == pytest.approx(HOST_US, rel=0.05)
    assert device == pytest.approx(KERNEL_US, rel=0.05)
    inputs = benchmarks["test_inputs"]
    assert (inputs["group"], inputs["extra_info"]) == ("shapes", {"shape": "4x3"})
    assert inputs["stats"]["rounds"] == 30


@pytest.mark.slow("three runs of pytest in processes of their own, with files of pytest-benchmark")
def test_saving_and_comparing_work_as_documented_upstream(project: pytest.Pytester) -> None:
    compared = ["--benchmark-compare=0001", "--benchmark-compare-fail=median:10%"]
    for kernel, options, status in (
        ("5e-6", ["--benchmark-save=first"], 0),
        ("5e-6", compared, 0),
        ("9e-6", compared, 1),
    ):
        project.makepyfile(
            test_it=f"""
            from simulated import QUEUE

            def test_device(gpu_benchmark):
                gpu_benchmark(QUEUE.call(kernel={kernel}))
            """
        )
        result = project.runpytest_subprocess(*PLUGIN, *options)
        assert result.ret == status, result.stdout.str()
    assert "Performance has regressed" in result.stdout.str() + result.stderr.str()
