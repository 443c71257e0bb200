"""By what results and inputs are known again: digests of bits, projections, and what is added to a
call to see the gate find it."""

import math
import statistics
import time
from unittest.mock import Mock

import pytest
import torch

from correctness_tests.support.contenders import weighed
from correctness_tests.support.gate_subjects import Make, nudged, reads_device_time, ready, turn
from tinyllama.harness.gate import digests
from tinyllama.harness.gate import subject as module
from tinyllama.harness.gate.digests import digest, digests_of_calls
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


@pytest.mark.parametrize("parts", [{}, {"_FEW": 4}, {"_FEW": 4, "_SOME": 9, "_PART": 32}], ids=str)
def test_calls_are_told_by_each_bit_alone_and_together(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, parts: dict[str, int]
) -> None:
    generator = torch.Generator().manual_seed(0)
    call = [torch.randn(size, generator=generator) for size in ((3, 7), (4,), (40, 2), ())]
    call = [call[0].bfloat16().to(device), *(one.to(device) for one in call[1:])]
    whole = digests_of_calls([call])
    for name, value in parts.items():
        monkeypatch.setattr(digests, name, value)
    others = []
    for place in range(len(call)):
        other = [one.clone() for one in call]
        other[place].view(-1)[-1] += 1
        others.append(other)
    swapped = [call[0], call[2].view(-1)[:4].clone(), call[2].clone(), call[3]]
    swapped[2].view(-1)[:4] = call[1]
    every = [call, *others, swapped, call]
    found = digests_of_calls(every)
    assert found == [digests_of_calls([one])[0] for one in every]
    assert found[0] == found[-1] == whole[0]
    assert len(set(found)) == len(found) - 1
    assert digests_of_calls([call, [], call[:2]])[0] == whole[0], "beside calls of other shapes"


def test_calls_of_two_sizes_are_told_as_each_alone() -> None:
    for sizes in ((4, 8), (8, 4), (4, 4, 8), (1, 2), (3, 0)):
        calls = [[torch.arange(size) + 5] for size in sizes]
        assert digests_of_calls(calls) == [digests_of_calls([one])[0] for one in calls]


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


def test_a_digest_is_a_sum_over_words_of_eight_bytes_with_odd_weights() -> None:
    """Modulo 2**64, in whole numbers without a limit."""
    odd = 0x9E3779B97F4A7C15
    words = [3, -5, 2**40 + 1, -(2**63), 0, 2**62 - 1]
    mixed = [(word ^ (word >> 32)) + 1 for word in words]
    expected = sum(one * (place * odd | 1) for place, one in enumerate(mixed)) % 2**64
    value = torch.tensor(words)
    for dtype in [*TYPES[1:], torch.int8]:
        same = value.view(dtype)
        assert digests.digest_of_all([same]) == digests_of_calls([[same]]) == [expected]
    assert digests_of_calls([[], [value], []]) == [0, expected, 0]


def test_a_digest_is_the_same_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = digest(value)
    for part in (1, 7, 1000):
        monkeypatch.setattr(digests, "_PART", part)
        assert digest(value) == whole


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_a_digest_is_of_values_wherever_they_lie(dtype: torch.dtype, start: int) -> None:
    """Words of eight bytes may begin inside of others."""
    generator = torch.Generator().manual_seed(0)
    value = torch.randint(-3, 4, (67,), generator=generator).to(dtype)
    part = value[start : start + 64]
    assert digests.digest_of_all([part, value]) == [digest(part.clone()), digest(value)]


def test_projections_are_sums_with_signs_that_are_as_often_plus_as_minus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    signs = torch.tensor([digests.projections(one) for one in torch.eye(64)])
    assert signs.abs().eq(1).all()
    assert abs(signs.sum()) < 4 * math.sqrt(signs.numel())
    value = torch.randn(64, generator=torch.Generator().manual_seed(0))
    assert digests.projections(value) == pytest.approx((value @ signs).tolist())
    assert digests.projections(torch.ones(3, dtype=torch.int64)) == (0.0,) * 8
    monkeypatch.setattr(digests, "_PART", 48)
    (first, *_), *_, (last, *_) = (digests.projections(one) for one in torch.eye(64))
    assert (abs(first), abs(last)) == (1, 1)


def test_projections_are_of_the_size_of_what_differs() -> None:
    value = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    error = 0.01 * torch.randn(10_000, generator=torch.Generator().manual_seed(1))
    found, moved = digests.projections(value), digests.projections(value + error)
    assert found == digests.projections(value.clone())
    distances = [abs(one - other) for one, other in zip(found, moved, strict=True)]
    assert all(distances)
    assert max(distances) < 8 * float(error.norm())


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
