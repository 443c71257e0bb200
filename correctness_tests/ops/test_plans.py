"""Providers that say that they may be repeated by plans give the same results so, bit for bit.

Without a GPU: tensors of the CPU pass for a GPU's, and what a compiled kernel would do is
interpreted (`correctness_tests.support.posed`). On a GPU: the compiled kernels.
"""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.support.posed import Posed
from tinyllama.harness import Op
from tinyllama.harness.check.cases import elements
from tinyllama.harness.check.evaluate import make_inputs
from tinyllama.harness.check.layouts import LAYOUTS, UPSTREAMS
from tinyllama.harness.declare.autograd import several
from tinyllama.harness.declare.op import Provider
from tinyllama.harness.kernels.launch_cache import as_written
from tinyllama.ops import OPS

REPEATED = [
    (op, provider)
    for op in OPS.values()
    for provider in op.providers.values()
    if provider.derived is not None and provider.derived.replays
]
EACH = pytest.mark.parametrize(
    ("op", "provider"), [pytest.param(*pair, id=str(pair[1])) for pair in REPEATED]
)
MANY_CASES = 6  # the smallest ones: larger ones take the same steps of Python
LAID_OUT: list[tuple[torch.dtype, dict[str, str]]] = [
    *((dtype, {}) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
    *((torch.float32, {"layout": name}) for name in LAYOUTS if name != "contiguous"),
    *((torch.float32, {"upstream": name}) for name in UPSTREAMS if name != "contiguous"),
]


def results(op: Op, provider: Provider, inputs: Any, used: str = "") -> list[torch.Tensor]:
    """Outputs, then gradients; used: the output whose upstream gradient alone is there."""
    args = {n: x.detach().requires_grad_(n in op.differentiable) for n, x in inputs.args.items()}
    outputs = dict(
        zip(op.outputs, several(provider.call(*args.values(), **inputs.params)), strict=True)
    )
    names = [used] if used else list(op.outputs)
    torch.autograd.backward([outputs[n] for n in names], [inputs.upstream[n] for n in names])
    return [*outputs.values(), *(x.grad for x in args.values() if x.grad is not None)]


def assert_repeated(op: Op, provider: Provider, inputs: Any, used: str = "") -> None:
    with as_written():
        expected = results(op, provider, inputs, used)
    for tensor, exact in zip(results(op, provider, inputs, used), expected, strict=True):
        assert (tensor.dtype, tensor.stride()) == (exact.dtype, exact.stride())
        assert torch.equal(tensor, exact)


@EACH
def test_repeated_calls_give_the_same_bits(op: Op, provider: Provider, posed: Posed) -> None:
    """The fourth call of a signature is made by a plan."""
    cases = sorted(op.cases, key=lambda case: elements(op, case))
    laid_out = [(case, *LAID_OUT[0]) for case in cases[:MANY_CASES]]
    laid_out += [(cases[0], dtype, options) for dtype, options in LAID_OUT[1:]]
    for case, dtype, options in laid_out:
        for seed in range(3):
            results(op, provider, make_inputs(op, case, dtype, seed=seed, **options))
        assert_repeated(op, provider, make_inputs(op, case, dtype, seed=3, **options))


@pytest.mark.gpu
@EACH
def test_so_do_compiled_kernels(op: Op, provider: Provider, device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("needs a GPU")
    for case in op.cases:
        for dtype in (torch.float32, torch.bfloat16):
            for seed in range(4):
                assert_repeated(op, provider, make_inputs(op, case, dtype, str(device), seed=seed))


@EACH
def test_so_do_calls_of_which_one_output_is_used(op: Op, provider: Provider, posed: Posed) -> None:
    inputs = make_inputs(op, op.cases[0], torch.float32)
    for name in [*op.outputs] * 5:
        assert_repeated(op, provider, inputs, used=name)


@EACH
def test_results_may_be_changed_in_place(op: Op, provider: Provider, posed: Posed) -> None:
    """Autograd refuses it for views that its functions return."""
    inputs = make_inputs(op, op.cases[0], torch.float32)
    for _ in range(5):
        args = [x.detach().requires_grad_(n in op.differentiable) for n, x in inputs.args.items()]
        assert not any(y._is_view() for y in several(provider.call(*args, **inputs.params)))


@pytest.mark.gpu
@EACH
def test_plans_are_captured_and_launch_on_the_current_stream(
    op: Op, provider: Provider, device: torch.device
) -> None:
    if device.type == "cpu":
        pytest.skip("needs a GPU")
    first, second = (make_inputs(op, op.cases[0], torch.float32, device, seed=n) for n in (0, 1))

    def call(inputs: Any) -> list[torch.Tensor]:
        with torch.no_grad():
            return list(several(provider.call(*inputs.args.values(), **inputs.params)))

    def write() -> None:
        for name, tensor in first.args.items():
            tensor.copy_(second.args[name])

    for _ in range(4):
        call(first)
    with as_written():
        expected = call(second)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(first)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream(device)):
        torch.cuda._sleep(10**8)  # tens of milliseconds, in which another stream reads old contents
        write()
        launched = call(first)
    torch.cuda.synchronize()
    assert all(map(torch.equal, launched, expected))
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, captured, expected))
