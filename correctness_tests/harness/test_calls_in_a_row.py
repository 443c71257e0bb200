"""The host's time of calls in a row: of which calls, on which inputs, and which are checked."""

import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from correctness_tests.support.contenders import (
    Contender,
    contender_fixture,  # noqa: F401
    weighed,
)
from tinyllama.harness.measure.calls_in_a_row import IN_A_ROW, QUEUED_KERNELS
from tinyllama.harness.measure.op_contender import BOTH, FORWARD, OpContender, WrongResultError


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


def test_calls_in_a_row_that_wait_are_timed_with_their_waits(contender: Contender) -> None:
    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        time.sleep(2e-3)
        assert x.sum().item() != 0
        return weighed(x, weight)

    made = contender(call, waits=True)
    made.row_clock.read = Mock(side_effect=AssertionError)  # type: ignore[method-assign]
    started = Mock(wraps=made.clock.queue)
    made.clock.queue = started
    found = made.in_a_row()
    assert [name for name, *_ in started.method_calls] == ["synchronize", "now", "now"]
    assert found is not None
    assert 2e-3 <= found < 2 * 2e-3


def test_calls_that_would_fill_the_queue_or_the_memory_are_in_no_row(
    contender: Contender, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, most = contender(weighed), QUEUED_KERNELS // IN_A_ROW
    for kernels, fits in ((most, True), (most + 1, False)):
        found = {FORWARD: {"kernels": 1}, BOTH: {"kernels": kernels}}
        monkeypatch.setattr(OpContender, "facts", lambda self, found=found: found)
        assert made.facts() == found
        assert (made.in_a_row() is not None) is fits
    made.kernels = 1
    monkeypatch.setattr(made, "_holds", lambda sets: sets < IN_A_ROW)
    assert made.in_a_row() is None


def test_inputs_of_a_row_may_take_a_share_of_a_gpus_memory(
    contender: Contender, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = contender(weighed)
    made._give(BOTH)
    monkeypatch.setattr(made, "device", SimpleNamespace(type="cpu"))
    assert made._holds(10**12), "a CPU holds any number"
    each = sum(
        x.nbytes for x in (*made.args.values(), *made.inputs.upstream.values()) if x is not None
    )
    monkeypatch.setattr(made, "device", SimpleNamespace(type="cuda"))
    monkeypatch.setattr(made, "_give", lambda name: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 16 * 20 * each))
    assert made._holds(20)
    assert not made._holds(21)
