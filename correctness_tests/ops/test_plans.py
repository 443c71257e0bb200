"""Providers that say that they may be repeated by plans give the same results so, bit for bit.

Without a GPU: tensors of the CPU pass for a GPU's, and what a compiled kernel would do is
interpreted (`correctness_tests.support.posed`). On a GPU: the compiled kernels.
"""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.support.posed import Posed
from tinyllama.harness import Case, Op
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
    ("op", "provider"), [pytest.param(*one, id=str(one[1])) for one in REPEATED]
)

CASES = [
    pytest.param(op, provider, case, id=f"{provider}-{case}")
    for op, provider in REPEATED
    for case in op.cases
]


def results_of(
    op: Op, provider: Provider, inputs: Any, wanted: tuple[str, ...] = ()
) -> list[torch.Tensor]:
    """Outputs, then the gradients of wanted inputs, by default of all."""
    wanted = wanted or op.differentiable
    args = {name: x.detach().requires_grad_(name in wanted) for name, x in inputs.args.items()}
    outputs = several(provider.call(*args.values(), **inputs.params))
    torch.autograd.backward(outputs, list(inputs.upstream.values()))
    gradients = [args[name].grad for name in wanted]
    assert all(gradient is not None for gradient in gradients)
    return [*outputs, *gradients]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(
        (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        and torch.equal(one, other)
        for one, other in zip(found, expected, strict=True)
    )


def repeated_and_written(
    op: Op, provider: Provider, case: Case, dtype: torch.dtype, device: str, **laid_out: str
) -> None:
    """The first two calls are planned, and later ones made by the plan, with the code's results."""
    for seed in range(4):
        inputs = make_inputs(op, case, dtype, device, seed=seed, **laid_out)
        with as_written():
            expected = results_of(op, provider, inputs)
        assert same(results_of(op, provider, inputs), expected), f"call {seed + 1}"


@pytest.mark.parametrize(("op", "provider", "case"), CASES)
def test_repeated_calls_give_the_same_bits(
    op: Op, provider: Provider, case: Case, posed: Posed
) -> None:
    repeated_and_written(op, provider, case, torch.float32, "cpu")


VARIED = [
    pytest.param(op, provider, dtype, laid_out, id=f"{provider}-{dtype}-{laid_out}")
    for op, provider in REPEATED
    for dtype, laid_out in [
        (torch.bfloat16, {}),
        (torch.float16, {}),
        *((torch.float32, {"layout": layout}) for layout in LAYOUTS if layout != "contiguous"),
        *((torch.float32, {"upstream": layout}) for layout in UPSTREAMS if layout != "contiguous"),
    ]
]


@pytest.mark.parametrize(("op", "provider", "dtype", "laid_out"), VARIED)
def test_so_do_calls_of_other_dtypes_and_layouts(
    op: Op, provider: Provider, dtype: torch.dtype, laid_out: dict[str, str], posed: Posed
) -> None:
    repeated_and_written(op, provider, op.cases[0], dtype, "cpu", **laid_out)


@pytest.mark.long
@EACH
def test_which_gradients_are_wanted_is_part_of_what_is_repeated(
    op: Op, provider: Provider, posed: Posed
) -> None:
    inputs = make_inputs(op, op.cases[0], torch.float32)
    for wanted in (op.differentiable[:1], op.differentiable, op.differentiable[1:]):
        for _ in range(4 if wanted else 0):
            with as_written():
                expected = results_of(op, provider, inputs, wanted)
            assert same(results_of(op, provider, inputs, wanted), expected)


@EACH
def test_so_do_outputs_of_which_one_is_used(op: Op, provider: Provider, posed: Posed) -> None:
    """What is saved for its shape alone gives the gradients of what the others need."""
    inputs = make_inputs(op, op.cases[0], torch.float32)

    def gradients(name: str) -> list[torch.Tensor]:
        args = [x.detach().requires_grad_(n in op.differentiable) for n, x in inputs.args.items()]
        outputs = several(provider.call(*args, **inputs.params))
        torch.autograd.backward([outputs[list(op.outputs).index(name)]], [inputs.upstream[name]])
        return [x.grad for x in args if x.grad is not None]

    for name in op.outputs:
        for _ in range(5):
            with as_written():
                expected = gradients(name)
            assert same(gradients(name), expected)


def negative(x: torch.Tensor) -> torch.Tensor:
    """The same values, as a tensor that stands for the negative of its memory."""
    found: torch.Tensor = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert found.is_neg()
    assert torch.equal(found, x)
    return found


@EACH
def test_a_tensor_that_stands_for_its_negative_is_read_as_its_values(
    op: Op, provider: Provider, posed: Posed
) -> None:
    """Before any call, and where a plan would read its memory."""
    for seed in range(8):
        inputs = make_inputs(op, op.cases[0], torch.float32, seed=seed)
        expected = results_of(op, provider, inputs)
        if seed % 4 == 3:
            turned = inputs.mapped(negative)
            assert same(results_of(op, provider, turned), expected)
            alone = replace(inputs, upstream=turned.upstream)
            assert same(results_of(op, provider, alone), expected)


@EACH
def test_results_may_be_changed_in_place(op: Op, provider: Provider, posed: Posed) -> None:
    """Autograd refuses it for views that its functions return."""
    derived = provider.derived
    assert derived is not None
    axes = [case for case in op.cases[1:] if tuple in map(type, case.dims.values())]
    for case, seed in itertools.product([op.cases[0], *axes[:2]], range(5)):
        inputs = make_inputs(op, case, torch.float32, seed=seed)
        expected = results_of(op, provider, inputs)
        args = {
            n: x.detach().requires_grad_(n in op.differentiable) for n, x in inputs.args.items()
        }
        outputs = several(provider.call(*args.values(), **inputs.params))
        assert not any(one._is_view() for one in outputs)
        if len(outputs) > 1 or {*derived.keep} & {*op.outputs}:
            continue  # autograd refuses it: another output has its version, or backward needs it
        (gradient,) = inputs.upstream.values()
        outputs[0].add_(1)
        outputs[0].backward(gradient)
        gradients = [args[name].grad for name in op.differentiable]
        assert same([one for one in gradients if one is not None], expected[1:])


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "provider", "case"), CASES)
def test_so_do_compiled_kernels(
    op: Op, provider: Provider, case: Case, device: torch.device
) -> None:
    if device.type == "cpu":
        pytest.skip("needs a GPU")
    for dtype in (torch.float32, torch.bfloat16):
        repeated_and_written(op, provider, case, dtype, str(device))


def planned_inputs(op: Op, provider: Provider, device: torch.device) -> tuple[Any, Any]:
    """Inputs of which calls without gradients are made by plans, and others like them."""
    if device.type == "cpu":
        pytest.skip("needs a GPU")
    first, second = (make_inputs(op, op.cases[0], torch.float32, device, seed=n) for n in (0, 1))
    for _ in range(4):
        call_of(provider, first)
    return first, second


def call_of(provider: Provider, inputs: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        return list(several(provider.call(*inputs.args.values(), **inputs.params)))


@pytest.mark.gpu
@EACH
def test_plans_are_captured_in_device_graphs(
    op: Op, provider: Provider, device: torch.device
) -> None:
    first, second = planned_inputs(op, provider, device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call_of(provider, first)
    for name, tensor in first.args.items():
        tensor.copy_(second.args[name])
    graph.replay()
    with as_written():
        assert same(found, call_of(provider, second))


@pytest.mark.gpu
@EACH
def test_plans_launch_on_the_current_stream(
    op: Op, provider: Provider, device: torch.device
) -> None:
    first, second = planned_inputs(op, provider, device)
    with as_written():
        expected = call_of(provider, second)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream(device)):
        torch.cuda._sleep(10**8)  # tens of milliseconds, in which another stream reads old contents
        for name, tensor in first.args.items():
            tensor.copy_(second.args[name])
        found = call_of(provider, first)
    torch.cuda.synchronize()
    assert same(found, expected)
