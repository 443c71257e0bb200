"""`gpu_benchmark`: pytest-benchmark's fixture measures the device, and stays what it is."""

import json
from typing import Any

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


def recorded(project: pytest.Pytester, *options: str) -> dict[str, dict[str, Any]]:
    """The benchmarks in the JSON of a run, by the name of the test."""
    result = project.runpytest_subprocess(*PLUGIN, "--benchmark-json=found.json", *options)
    assert result.ret == 0, result.stdout.str()
    benchmarks = json.loads((project.path / "found.json").read_text())["benchmarks"]
    return {benchmark["name"]: benchmark for benchmark in benchmarks}


@pytest.mark.long
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
    benchmarks = recorded(project, "--benchmark-only")
    host, device = (
        benchmarks[name]["stats"]["median"] * 1e6 for name in ("test_plain", "test_device")
    )
    assert host == pytest.approx(HOST_US, rel=0.05)
    assert device == pytest.approx(KERNEL_US, rel=0.05)


@pytest.mark.long
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
    benchmarks = recorded(project, "--benchmark-only")
    assert benchmarks["test_inputs"]["extra_info"] == {"shape": "4x3"}
    assert benchmarks["test_inputs"]["group"] == "shapes"
    assert benchmarks["test_inputs"]["stats"]["rounds"] == 30


@pytest.mark.long
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
