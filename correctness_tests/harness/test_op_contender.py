"""A provider that is timed: readings of each pass, on fresh inputs and cold caches, and facts.

Every timed call is checked: one that is wrong gives no time.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from correctness_tests.support.contenders import FILES, PACKAGE, Call, Turning, weighed
from correctness_tests.support.launched import tree_ops
from tinyllama.harness.measure.clock import Reading
from tinyllama.harness.measure.op_contender import (
    BOTH,
    FORWARD,
    IN_A_ROW,
    OpContender,
    Timed,
    ops_of,
    untimed,
)
from tinyllama.harness.measure.right_results import WrongResultError
from tinyllama.ops import OPS

Contender = Callable[..., OpContender]


@pytest.fixture
def contender(device: torch.device) -> Iterator[Contender]:
    """Makes contenders whose first call is checked; a call becomes a provider with these traits,
    until the test ends."""
    ops = ops_of(PACKAGE, FILES)
    tried: set[str] = set()

    def make(
        call: Call | str, op: str = "weigh_rows", dtype: str = "fp32", case: int = 0, **traits: Any
    ) -> OpContender:
        name = call if isinstance(call, str) else "tried"
        if not isinstance(call, str):
            ops[op].providers[name] = replace(ops[op]["eager"], name=name, call=call, **traits)
            tried.add(op)
        made = OpContender(Timed(op, name, case, dtype), str(device), PACKAGE, FILES)
        made.check_first()
        return made

    try:
        yield make
    finally:
        for op in tried:
            del ops[op].providers["tried"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_right_provider_gives_readings_of_each_pass(contender: Contender, dtype: str) -> None:
    right = contender(weighed, dtype=dtype)
    for _ in range(10):
        readings = right.turn()
        assert list(readings) == [FORWARD, BOTH]
        for reading in readings.values():
            assert isinstance(reading, Reading)
            assert reading.queued
            assert 0 < reading.device < 1
            assert 0 < reading.host < 1


TREE = [(op.name, name) for op in tree_ops() for name in op.providers if op.timed]


@pytest.mark.long
@pytest.mark.parametrize(("op", "provider"), TREE)
def test_the_providers_of_the_tree_raise_no_false_alarm(
    contender: Contender, device: torch.device, op: str, provider: str
) -> None:
    if reason := untimed(OPS[op][provider], device):
        pytest.skip(reason)
    right = contender(provider, op)
    assert set(right.turn()) == set(right.passes)


def test_inputs_are_fresh_and_caches_cold_in_each_round(contender: Contender) -> None:
    inputs: list[torch.Tensor] = []

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        inputs.append(x.detach().clone())
        return weighed(x, weight)

    right = contender(call)
    flushes: list[int] = []
    flushed: list[torch.Tensor] = []

    def flush() -> None:
        flushes.append(len(inputs))
        flushed.append(right.args.get("x", torch.empty(0)).detach().clone())

    right.flush = flush  # type: ignore[assignment]
    for _ in range(4):
        right.turn()
    assert len(inputs) >= 1 + 2 * 4
    assert len({x.sum().item() for x in inputs}) == len(inputs)
    assert flushes == list(range(1, len(inputs))), "ahead of each try to time a call"
    assert all(map(torch.equal, flushed, inputs[1:])), (
        "behind the making of inputs, which warms caches"
    )


def test_a_call_that_waits_is_timed_by_what_the_device_does(contender: Contender) -> None:
    """Its gaps are the host's, and no queue runs ahead of it."""

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        assert x.sum().item() != 0
        time.sleep(0.05)
        return weighed(x, weight)

    for reading in contender(call, waits=True).turn().values():
        assert 0 < reading.device < 0.05 <= reading.host
        assert not reading.queued


def test_layouts_see_a_provider_that_is_slow_on_strided_inputs(contender: Contender) -> None:
    """The documented fault: 20 times slower on inputs that are not contiguous."""

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if not x.is_contiguous():
            time.sleep(2e-3)
            if x.device.type != "cpu":
                torch.cuda._sleep(4_000_000)
        return weighed(x, weight)

    ratios = contender(call).layouts(("strided", "expanded"), rounds=8)
    assert set(ratios) == {"strided", "expanded"}
    for median, low, high in ratios.values():
        assert low <= median <= high
        assert median > 2


def test_facts_are_of_each_pass(contender: Contender, device: torch.device) -> None:
    by_pass = contender(weighed).facts()
    assert set(by_pass) == {FORWARD, BOTH}
    for facts in by_pass.values():
        assert set(facts) == {"peak_bytes", "kernels"}
        if device.type == "cpu":
            assert set(facts.values()) == {None}, "a CPU counts neither"
        else:
            assert facts["peak_bytes"] >= 16 * 64 * 4
            assert facts["kernels"] >= 1


def size(tensor: torch.Tensor | None) -> int:
    assert tensor is not None
    return tensor.numel() * tensor.element_size()


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
def test_both_passes_hold_what_they_give(contender: Contender) -> None:
    right = contender(weighed)
    first = right.facts()
    results = sum(map(size, (*right.outputs, *right.gradients)))
    right.turn()
    assert right.facts() == first
    assert first[BOTH]["peak_bytes"] >= results > first[FORWARD]["peak_bytes"]


def test_the_host_time_of_calls_in_a_row_is_that_of_one_of_them(contender: Contender) -> None:
    inputs: list[torch.Tensor] = []

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        time.sleep(2e-3)
        inputs.append(x.detach())
        return weighed(x, weight)

    right = contender(call)
    inputs.clear()
    seconds = right.in_a_row()
    assert seconds is not None
    assert 2e-3 <= seconds < IN_A_ROW * 2e-3
    assert len(inputs) % IN_A_ROW == 0
    assert len({x.sum().item() for x in inputs}) == len(inputs), "each on inputs of its own"
    assert right.backward


# -- results --------------------------------------------------------------------------------------

# Which results are wrong is one rule: the table of faults is in gate/test_gate_timed_call.py.
FAULTS: dict[str, Call] = {
    "too large": lambda x, weight: weighed(x, weight) * 1.001,
    "half the gradient": lambda x, weight: weighed(x, weight / 2 + weight.detach() / 2),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_comes_late_is_found_when_it_comes(contender: Contender, fault: str) -> None:
    call = Turning(FAULTS[fault])
    faulty = contender(call)
    for _ in range(3):
        faulty.turn()
    assert faulty.in_a_row()
    call.turned = True
    for timed in (faulty.turn, faulty.in_a_row):
        with pytest.raises(WrongResultError, match="a timed call: "):
            timed()


def test_a_wrong_first_call_is_found_before_anything_is_timed(contender: Contender) -> None:
    with pytest.raises(WrongResultError, match="weigh_rows-tried-N16D64-fp32: y: at "):
        contender(lambda x, weight: weighed(x, weight) * 1.001)


def overwritten(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Its inputs are scratch memory to it; what it returns fits them."""
    x.detach().zero_()
    return weighed(x, weight)


class _Overwriting(torch.autograd.Function):
    """Right, but its backward leaves x scaled."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (dy,), (x, weight) = grads, ctx.saved_tensors
        dweight = (dy * x).sum(0)
        x.data.mul_(2)
        return dy * weight, dweight


def test_inputs_are_overwritten_by_no_backward_that_does_not_say_so(contender: Contender) -> None:
    for said in ((), ("weight",)):
        with pytest.raises(AssertionError, match="backward changed its input x"):
            contender(_Overwriting.apply, overwrites=said)
    says = contender(_Overwriting.apply, overwrites=("x",))
    for _ in range(3):
        assert set(says.turn()) == set(says.passes)
    with pytest.raises(AssertionError, match="forward changed its input x"):
        contender(overwritten, overwrites=("x",))


@pytest.mark.long
@pytest.mark.parametrize("left_out", ["one_moment", "step"])
def test_an_op_in_place_is_checked_by_what_it_wrote(contender: Contender, left_out: str) -> None:
    eager = OPS["adamw"]["eager"].call
    faults = False

    def call(*args: Any, **params: Any) -> None:
        _, _, exp_avg, _, step, _ = args
        forgotten = {
            "one_moment": [exp_avg[0]],
            "step": [step],
        }[left_out]
        before = [tensor.clone() for tensor in forgotten]
        eager(*args, **params)
        if faults:
            for tensor, old in zip(forgotten, before, strict=True):
                tensor.copy_(old)

    faulty = contender(call, "adamw")
    assert list(faulty.turn()) == [FORWARD]
    faults = True
    with pytest.raises(WrongResultError):
        faulty.turn()
