"""What a side does in its process when it is asked."""

import pytest
import torch

from correctness_tests.support.contenders import FILES, PACKAGE
from tinyllama.harness.gate.benchmarks import Registered
from tinyllama.harness.gate.metric import ALL_WORK, DEVICE
from tinyllama.harness.gate.pair import FACTORY, READY
from tinyllama.harness.gate.worker import Side
from tinyllama.harness.machine.worker import Worker

REGISTERED = Registered(PACKAGE, FILES)
WEIGHED = "weigh_rows-eager-N16D64-fp32/forward+backward"


@pytest.fixture
def side() -> Side:
    return Side("cpu", REGISTERED)


def test_a_benchmark_is_prepared_verified_timed_and_held_to_float64(side: Side) -> None:
    assert 0 < side.begin(WEIGHED, (DEVICE,)) < 60
    assert isinstance(side.inputs(WEIGHED), int)
    assert set(side.verify(WEIGHED, 3)) == {"y", "grad x", "grad weight"}
    side.make_ready(WEIGHED, None, warm_up=0.0)
    assert set(side.turn(WEIGHED, 5)) == {DEVICE, ALL_WORK + DEVICE}
    with pytest.raises(ValueError, match="the last turn kept no call"):
        side.proofs(WEIGHED)
    side.turn(WEIGHED, 5, 3)
    assert set(side.proofs(WEIGHED)) == {"y", "grad x", "grad weight"}
    assert side.counted(WEIGHED) == {}, "a CPU counts nothing"
    assert side.compiled(WEIGHED) == [], "and its kernels are not compiled"
    profiles = side.profiles(WEIGHED, 3)
    assert all(any("mul" in name for name in profile) for profile in profiles)
    side.end(WEIGHED)
    with pytest.raises(KeyError):
        side.turn(WEIGHED, 6)


@pytest.mark.gpu
def test_the_workspace_of_blas_is_kept_by_no_benchmark(gpu: torch.device) -> None:
    name, worker = "linear-torch-N256D128F256-bf16/forward+backward", Worker("a side")
    try:
        registered = Registered("tinyllama.ops")
        worker.make("side", FACTORY, device=str(gpu), registered=registered, timeout=READY)
        for request in (("warm_up_blas",), ("begin", name, (DEVICE,))):
            worker.call("side", *request, timeout=READY)
        assert worker.call("side", "counted", name, timeout=READY)["kept_bytes"] == 0
    finally:
        worker.close()
