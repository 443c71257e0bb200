"""By what results and inputs are known again: digests of bits, projections, and what is added to a
call to see the gate find it."""

import statistics
import time
from unittest.mock import Mock

import pytest
import torch

from correctness_tests.support.contenders import weighed
from correctness_tests.support.gate_subjects import Make, nudged, reads_device_time, ready, turn
from tinyllama.harness.gate import subject as module
from tinyllama.harness.gate.digests import digest
from tinyllama.harness.gate.subject import CALLS, DEVICE

# -- digests ----------------------------------------------------------------------------------

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32]


@pytest.mark.parametrize("dtype", [*TYPES, torch.int8, torch.bool], ids=str)
def test_a_digest_tells_one_element_and_two_that_are_swapped(
    device: torch.device, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    value = torch.randint(-3, 4, (64, 3), generator=generator).to(dtype).to(device)
    flat = value.view(-1)
    first, other = (int(flat.ne(flat[0]).nonzero()[at]) for at in (0, -1))
    changed, swapped = flat.clone(), flat.clone()
    changed[first] = flat[0]
    swapped[[0, other]] = flat[[other, 0]]
    found = {digest(each.view(64, 3)) for each in (value, changed, swapped)}
    assert len(found) == 3
    assert digest(value.T.contiguous().T) == digest(value), "whatever its strides"


def test_a_digest_tells_one_bit_anywhere() -> None:
    value = torch.randn(100, generator=torch.Generator().manual_seed(0))
    found = {digest(value)}
    for place in (0, 1, 63, 99):
        for bit in (0, 7, 22, 30):
            bits = value.view(torch.int32).clone()
            bits[place] ^= 1 << bit
            found.add(digest(bits.view(torch.float32)))
    assert len(found) == 1 + 4 * 4
    assert digest(torch.zeros(3)) != digest(-torch.zeros(3))
    assert digest(torch.tensor([2, 0])) != digest(torch.tensor([0, 1])), "no sum of places"


# -- inputs -----------------------------------------------------------------------------------


def test_inputs_have_one_digest_whatever_was_called(subject: Make) -> None:
    made = subject()
    before = made.input_digest()
    turn(ready(made))
    assert made.input_digest() == before == subject(nudged).input_digest()


# -- work that is added -----------------------------------------------------------------------


def test_work_that_is_added_takes_a_share_of_each_call(
    subject: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if x.device.type != "cpu":
            pytest.skip("a GPU's work is not that of the host")
        end = time.perf_counter() + 2e-3
        while time.perf_counter() < end:
            pass
        return weighed(x, weight)

    made, added = ready(subject(call)), Mock(wraps=module.keep_busy)
    monkeypatch.setattr(module, "keep_busy", added)
    assert turn(made)[DEVICE] >= 2e-3
    assert not added.called
    made.slow_down(0.5)
    assert turn(made)[DEVICE] >= 3e-3, "and its results are right"
    assert added.call_count == 1 + CALLS
    assert all(1e-3 <= call.args[0] < 1 for call in added.call_args_list)


@reads_device_time
@pytest.mark.usefixtures("gpu")
def test_work_on_the_device_takes_the_share_that_it_says(subject: Make) -> None:
    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(400_000)  # some 200 us
        return weighed(x, weight)

    made = ready(subject(call, metrics=(DEVICE,)))
    plain, counted = [turn(made)[DEVICE] for _ in range(9)], made.counted()
    made.slow_down(0.5)
    slowed = [turn(made)[DEVICE] for _ in range(9)]
    assert 1.35 < statistics.median(slowed) / statistics.median(plain) < 1.75
    assert made.counted() == {**counted, "kernels": counted["kernels"] + 1}
