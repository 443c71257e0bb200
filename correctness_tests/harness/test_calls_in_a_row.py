"""The host's time of calls in a row: of which calls, on which inputs, and which are checked."""

import time

import pytest
import torch

from correctness_tests.support.contenders import (
    Contender,
    contender_fixture,  # noqa: F401
    weighed,
)
from tinyllama.harness.measure.calls_in_a_row import IN_A_ROW
from tinyllama.harness.measure.op_contender import WrongResultError


def test_the_host_time_of_calls_in_a_row_is_that_of_one_of_them(contender: Contender) -> None:
    seen: list[torch.Tensor] = []

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        time.sleep(2e-3)
        seen.append(x.detach())
        return weighed(x, weight)

    right = contender(call)
    seen.clear()
    found = right.in_a_row()
    assert found is not None
    assert 2e-3 <= found < 2 * 2e-3
    assert len(seen) % IN_A_ROW == 0
    assert len({x.sum().item() for x in seen}) == len(seen), "each on inputs of its own"
    assert right.backward


@pytest.mark.parametrize("wrong", [1, IN_A_ROW], ids=["first", "last"])
def test_the_last_of_calls_in_a_row_is_checked(wrong: int, contender: Contender) -> None:
    made = 0

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        nonlocal made
        made += 1
        return weighed(x, weight) * (2 if made % IN_A_ROW == wrong % IN_A_ROW else 1)

    made = 1  # the first check is of a right call
    right = contender(call)
    made = 0
    if wrong == IN_A_ROW:
        with pytest.raises(WrongResultError, match="of a timed call"):
            right.in_a_row()
    else:
        assert right.in_a_row()
