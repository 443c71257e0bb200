"""What a side keeps of a GPU's memory in its process."""

import pytest
import torch

from tinyllama.harness.gate.benchmarks import Registered
from tinyllama.harness.gate.metric import DEVICE
from tinyllama.harness.gate.pair import FACTORY, READY
from tinyllama.harness.machine.worker import Worker


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
