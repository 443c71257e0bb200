"""What is timed behind a spinning kernel fits into the queue of a device: 1,024 with CUDA."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tinyllama.harness.declare.op import Op
from tinyllama.harness.declare.provider import Provider
from tinyllama.harness.measure.op_contender import Timed, provider_of
from tinyllama.ops import OPS

QUEUE = 1000
OF_TORCH = [
    pytest.param(op, provider, id=f"{op.name}-{provider.name}")
    for op in OPS.values()
    for provider in op.providers.values()
    if provider.derived is None and not provider.requires and op.timed
    if not (provider.waits or provider.counts_on_host)
]


class Counted(TorchDispatchMode):
    """Counts the operators that are no views: each launches one kernel, mostly."""

    count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += not operator.is_view
        return operator(*args, **(kwargs or {}))


def count(op: Op, provider: Provider) -> int:
    """The operators of forward and backward on the largest timed case, without its memory."""
    timed = Timed(op.name, provider.name, len(op.timed) - 1, "fp32")
    with FakeTensorMode(), Counted() as counted:
        inputs = timed.case_of(op, provider).inputs("cpu", 0)
        counted.count = 0
        for name in op.differentiable:
            inputs.args[name].requires_grad_(True)
        given = provider.call(*inputs.args.values(), **inputs.params)
        outputs = given if isinstance(given, tuple) else (given,)
        floating = [one for one in outputs if one is not None and one.requires_grad]
        if floating:
            torch.autograd.backward(floating, [torch.ones_like(one) for one in floating])
    return counted.count


@pytest.mark.parametrize(("op", "provider"), OF_TORCH)
def test_a_call_fits_into_the_queue(op: Op, provider: Provider) -> None:
    assert 0 < count(op, provider) < QUEUE


def test_a_call_that_does_not_fit_says_so() -> None:
    eager = OPS["stack"]["eager"]
    assert eager.waits
    assert not provider_of(OPS["stack"], "compile").waits, "its calls have fewer kernels"
    assert count(OPS["stack"], eager) > QUEUE
