"""What the derived cases cannot ask of the optimizer's kernel.

Bits where nothing may change, its scalars at any step, and tensors at any address.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tinyllama.harness.kernels.chips import processors
from tinyllama.harness.kernels.launch import recorded
from tinyllama.ops.adamw import State, adamw, count, update

pytest.importorskip("triton")


def states(device: torch.device, sizes: Sequence[int] = (5, 3000)) -> list[list[torch.Tensor]]:
    """param, grad, exp_avg, exp_avg_sq."""
    generator = torch.Generator().manual_seed(3)
    drawn = [[torch.randn(n, generator=generator).to(device) for n in sizes] for _ in range(4)]
    drawn[3] = [v.abs() for v in drawn[3]]
    return drawn


def scalars(device: torch.device, step: float = 2.0, found_inf: float = 0.0) -> list[torch.Tensor]:
    return [torch.tensor(value, device=device) for value in (step, found_inf)]


def copies(lists: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    return [[tensor.clone() for tensor in tensors] for tensors in lists]


def assert_near(actual: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> None:
    for tensor, exact in zip(itertools.chain(*actual), itertools.chain(*expected), strict=True):
        torch.testing.assert_close(tensor, exact)


@pytest.mark.parametrize("step", [0.0, 7.0])
def test_a_skipped_step_changes_no_bit(step: float, device: torch.device) -> None:
    tensors = states(device)
    tensors[1] = [torch.full_like(g, float("nan")) for g in tensors[1]]
    before = copies(tensors)
    count, found_inf = scalars(device, step=step, found_inf=1.0)
    adamw["triton"](*tensors, count, found_inf, lr=0.1)
    assert count.item() == step
    for index in (0, 2, 3):
        for tensor, old in zip(tensors[index], before[index], strict=True):
            assert torch.equal(tensor, old)


@pytest.mark.parametrize("step", [0, 1, 9, 999, 10**6, 2**24 - 2, 2**24 - 1])
def test_bias_corrections_at_any_step(step: int, device: torch.device) -> None:
    """To a rounding of float32: in it, 1 - 0.999 is off by 1.3e-5."""
    counted, found_inf = scalars(device, step=float(step))
    factors = count(counted, found_inf, 0.25, 0.9, 0.999, 0.5)
    t = step + 1
    exact = [1 - 0.25 * 0.5, 0.25 / (1 - 0.9**t), 1 / math.sqrt(1 - 0.999**t)]
    assert counted.item() == t
    for value, want in zip(factors.tolist(), exact, strict=True):
        assert abs(value / want - 1) <= torch.finfo(torch.float32).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_learning_rate_may_be_a_tensor(dtype: torch.dtype, device: torch.device) -> None:
    results = []
    for lr in (0.125, torch.tensor(0.125, dtype=dtype, device=device)):
        tensors = states(device)
        adamw["triton"](*tensors, *scalars(device), lr=lr)
        results.append(tensors)
    for left, right in zip(*map(itertools.chain.from_iterable, results), strict=True):
        assert torch.equal(left, right)


def test_tensors_at_any_address_and_in_any_layout(device: torch.device) -> None:
    """Addresses that no vector divides, and a matrix whose memory is transposed."""
    unchanged = states(device, sizes=(12, 3000))
    odd = [
        [torch.nn.functional.pad(t, (1, 0))[1:] for t in (tensors[1], tensors[0])]
        for tensors in unchanged
    ]
    for tensors in odd:
        tensors[1] = tensors[1].view(4, 3).T.contiguous().T
    results = [copies(unchanged), odd]
    for lists in results:
        adamw["triton"](*lists, *scalars(device), lr=0.1)
    flat = [[second.reshape(-1), first] for first, second in odd]
    for left, right in zip(itertools.chain(*flat), itertools.chain(*results[0]), strict=True):
        assert torch.equal(left, right)


def test_gradients_may_be_narrow(device: torch.device) -> None:
    tensors = states(device)
    tensors[1] = [g.bfloat16() for g in tensors[1]]
    expected = copies(tensors)
    adamw["triton"](*tensors, *scalars(device), lr=0.1)
    expected[1] = [g.float() for g in expected[1]]
    adamw["eager"](*expected, *scalars(device), lr=0.1)
    for index in (0, 2, 3):
        assert_near([tensors[index]], [expected[index]])


def test_lists_that_do_not_fit_are_refused(device: torch.device) -> None:
    tensors = states(device)
    tensors[1][0] = tensors[1][0][:4]
    with pytest.raises(ValueError, match="grad has other sizes than param"):
        adamw["triton"](*tensors, *scalars(device))
    tensors = states(device)
    tensors[2][0] = tensors[2][0].bfloat16()
    with pytest.raises(ValueError, match="exp_avg differ in dtype"):
        adamw["triton"](*tensors, *scalars(device))


def test_nothing_to_update_still_counts(device: torch.device) -> None:
    nothing: list[list[torch.Tensor]] = [[], [], [], []]
    for lists in (nothing, states(device, sizes=(0, 0))):
        count, found_inf = scalars(device)
        adamw["triton"](*lists, count, found_inf)
        assert count.item() == 3


# -- tables of addresses ------------------------------------------------------------------------


def test_copies_and_few_programs_change_no_bit(device: torch.device) -> None:
    """Six blocks of three tensors and two programs, each of which takes several."""
    tensors = states(device, (3000, 5, 2048))
    mine: list[list[Any]] = [[*copies(tensors), *scalars(device)] for _ in range(2)]
    contiguous, state = (State(*lists) for lists in mine)
    rates: dict[str, Any] = {"lr": 0.05, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
    adamw["triton"](*contiguous, **rates, eps=1e-3)
    low = [torch.full_like(p, torch.nan, dtype=torch.bfloat16) for p in state.param]
    factors = count(state.step, state.found_inf, **rates)
    with processors(1):
        update(state, **rates, eps=1e-3, low=low, factors=factors, few_programs=True)
    for ours, theirs in zip(state[:4], contiguous[:4], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert torch.equal(state.step, contiguous.step)
    for copy, p in zip(low, state.param, strict=True):
        assert torch.equal(copy, p.to(torch.bfloat16))
    with pytest.raises(ValueError, match="the rounded copies are not dense, or have other sizes"):
        update(state, **rates, eps=1e-3, low=low[:2])


def test_tensors_that_adjoin_are_updated_as_one(device: torch.device) -> None:
    """Without a table, and to the same bits."""
    sizes = (3000, 5, 2048)
    tensors = states(device, sizes)
    lists: list[Any] = [*copies(tensors), *scalars(device)]
    contiguous = State(*lists)
    rates: dict[str, Any] = {"lr": 0.05, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
    adamw["triton"](*contiguous, **rates, eps=1e-3)
    for overlapped in (False, True):
        lists = [[*torch.cat(same).split(sizes)] for same in tensors]
        mine = State(*lists, *scalars(device))
        low = [*torch.full((sum(sizes),), torch.nan, dtype=torch.bfloat16).to(device).split(sizes)]
        with recorded("sm_90") as launches:
            update(mine, **rates, eps=1e-3, low=low, few_programs=overlapped)
        assert launches[-1].arguments["table"] is None
        with processors(1):
            update(mine, **rates, eps=1e-3, low=low, few_programs=overlapped)
        for copy, p in zip(low, mine.param, strict=True):
            assert torch.equal(copy, p.to(torch.bfloat16))
        for ours, theirs in zip(mine[:4], contiguous[:4], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("number", [1.0, math.inf, -math.inf, math.nan])
def test_a_judged_number_decides_whether_a_step_counts(number: float, device: torch.device) -> None:
    left = float(math.isfinite(number))  # by the step before: the other way round
    step, found_inf = scalars(device, step=4.0, found_inf=left)
    judged = torch.tensor(number, device=device)
    count(step, found_inf, 0.1, 0.9, 0.99, 0.0, judged)
    assert found_inf.item() == (not math.isfinite(number))
    assert step.item() == 4 + math.isfinite(number)
