"""More elements than float32 can number: what is wrong there alone, and where nothing is said."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from correctness_tests.support.tried import finding, small
from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.correct.checks import Outcome, Rank, last_entries, sizes

FEW = 2**13
Call = Callable[..., torch.Tensor]
BIAS = small(
    "add_row_bias",
    lambda x, bias: x + bias[:, None],
    {"x": Tensor("N D"), "bias": Tensor("N")},
    {"y": "N D"},
    [Case(N=4, D=64)],
)


@pytest.fixture(autouse=True)
def no_other_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "SIZES", (3,))


def by_numbers_in_float32(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    row = (torch.arange(x.numel()).float() / x.shape[1]).long().clamp(max=len(bias) - 1)
    return (x.reshape(-1) + bias[row]).view(x.shape)


def test_elements_that_are_numbered_in_float32_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_entries, "MANY", 2**24)
    one = finding(BIAS, by_numbers_in_float32, "sizes")
    assert (one.outcome, one.rank) == (Outcome.FAILED, Rank.WRONG), one
    assert one.message == "the last of 16,777,216 elements and more of y are wrong"
    assert one.case == "add_row_bias-tried-N262208D64-fp32"


def beyond(rows: int, factor: float = 1.1) -> Call:
    def call(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        y = x + bias[:, None]
        return torch.cat([y[:rows], y[rows:] * factor])

    return call


@pytest.mark.parametrize(("factor", "good"), [(1.0, True), (1.02, True), (1.04, False)])
def test_the_last_entries_are_compared_and_said(factor: float, good: bool) -> None:
    size = FEW // 64 + last_entries.ENDS
    one = finding(BIAS, beyond(size - 1 if good else size - last_entries.ENDS, factor), "sizes")
    assert one.outcome is (Outcome.PASSED if good else Outcome.FAILED), one
    if good:
        assert one.message.endswith(f"; the last 64 of {size} entries of N are right")


def test_what_torch_gives_as_well_is_right() -> None:
    op = Op(
        "alike",
        inputs={"x": Tensor("N D"), "bias": Tensor("N")},
        outputs={"y": "N D"},
        cases=[Case(N=4, D=64)],
        dtypes=(torch.float32,),
    )
    op.reference(lambda x, bias: x + bias[:, None])
    op.provider("torch")(beyond(150))
    assert finding(op, beyond(150), "sizes").outcome is Outcome.PASSED


def tried(op: Op, call: Call, **traits: Any) -> list[int]:
    """The lengths of the calls with more than 4 rows."""
    seen: list[int] = []

    def noted(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(len(x))
        return call(x, *rest)

    assert finding(op, noted, "sizes", **traits).outcome is Outcome.PASSED
    return [one for one in seen if one > 131]


def test_a_call_that_takes_long_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_entries, "SECONDS", 0.2)
    right = BIAS["eager"].call

    def slow(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        until = time.thread_time() + len(x) * 1e-3
        while len(x) > 4 and time.thread_time() < until:
            pass
        return right(x, bias)

    assert tried(BIAS, right) == [FEW // 64 + last_entries.ENDS]
    assert tried(BIAS, slow) == []


def test_results_that_are_much_larger_than_inputs_are_not_made() -> None:
    op = small(
        "each_with_each",
        lambda x: x[:, None] - x[None, :].expand(len(x), len(x)),
        {"x": Tensor("N")},
        {"y": "N N"},
        [Case(N=4)],
    )
    assert tried(op, op["eager"].call) == []


def test_entries_of_several_inputs_count_by_the_largest() -> None:
    wide = small(
        "wide",
        lambda x, y: x + y.sum(1, keepdim=True),
        {"x": Tensor("N D"), "y": Tensor("N F")},
        {"z": "N D"},
        [Case(N=4, D=2, F=256)],
    )
    assert tried(wide, wide["eager"].call) == [FEW // 256 + last_entries.ENDS] * (FEW // 256 > 67)
