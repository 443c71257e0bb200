"""What a right provider gives: proofs and times, with its inputs where they lay."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from correctness_tests.support.contenders import weighed
from correctness_tests.support.gate_subjects import (
    Make,
    held,
    reads_device_time,
    ready,
    turn,
)
from tinyllama.harness.gate import subject as module
from tinyllama.harness.gate.proven import SEEDS
from tinyllama.harness.gate.subject import CALLS, DEVICE, HOST
from tinyllama.harness.gate.turns import times
from tinyllama.harness.measure.op_contender import WrongResultError

BOTH = (DEVICE, HOST)
RESULTS = {"y", "grad x", "grad weight"}


# -- right ------------------------------------------------------------------------------------


@pytest.mark.long
@reads_device_time
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_right_provider_is_proven_for_each_seed_and_gives_times(
    subject: Make, device: torch.device, dtype: str
) -> None:
    made = subject(dtype=dtype, metrics=BOTH)
    proofs = made.verify()
    assert [set(proof) for proof in proofs] == [RESULTS] * SEEDS
    assert proofs[0]["y"] != proofs[1]["y"], "the seeds give other inputs"
    made.expect(proofs)
    for _ in range(3):
        seconds = held(made)
        assert times(seconds) == ({DEVICE} if device.type == "cpu" else {DEVICE, HOST})
        assert all(0 < value < 1 for value in seconds.values())


def test_inputs_of_repeated_calls_lie_where_they_lay_in_the_turn_before(subject: Make) -> None:
    seen: list[tuple[int, int]] = []

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.append((x.data_ptr(), weight.data_ptr()))
        return weighed(x, weight)

    made = ready(subject(call))
    turns = []
    for _ in range(3):
        seen.clear()
        turn(made)
        turns.append(list(seen))
        taken = torch.empty(1000)  # and nothing else may come to lie there
    assert turns[0] == turns[1] == turns[2], taken
    assert len(set(turns[0])) == 1 + CALLS


def test_a_call_that_spoils_its_inputs_is_wrong_and_does_not_spoil_the_next(subject: Make) -> None:
    spoiled = torch.tensor([1.0])

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = weighed(x, weight.clone())
        weight.detach().mul_(spoiled.to(weight))
        return y

    made = ready(subject(call))
    spoiled.zero_()
    for _ in range(2):
        held(made)
    with pytest.raises(WrongResultError, match="forward changed its input weight"):
        made.verify()


@reads_device_time
@pytest.mark.parametrize("metrics", [(DEVICE,), (HOST,), BOTH], ids=" ".join)
def test_it_gives_the_times_it_was_asked_for(
    subject: Make, device: torch.device, metrics: tuple[str, ...]
) -> None:
    seconds = turn(ready(subject(metrics=metrics)))
    assert times(seconds) == ({DEVICE} if device.type == "cpu" else set(metrics))


def test_of_repeated_calls_the_fastest_counts_but_for_the_first(
    subject: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first takes no time; of the others those in the middle take the least."""
    left: list[float] = []
    now = [0.0]

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        now[0] += left.pop() if left else 0.0
        return weighed(x, weight)

    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    made = ready(subject(call))
    left[:] = [0.06, 0.05, 0.025, 0.02, 0.04, 0.03, 0.0]  # the last one first
    assert len(left) == 1 + CALLS
    seconds, mean = turn(made).values()
    assert not left
    assert seconds == pytest.approx(0.0225), "the mean of 20 and 25 ms, one on each seed's inputs"
    assert mean == pytest.approx(0.0325), "of all but the first, each at most 40 ms"


class _Passing(torch.autograd.Function):
    """A tensor as it is; keeps in which thread its gradient passed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, threads: list[int]) -> torch.Tensor:
        ctx.threads = threads
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.threads.append(threading.get_ident())
        return gradients[0], None


@reads_device_time
def test_the_backward_pass_works_in_the_thread_of_its_caller(subject: Make) -> None:
    """On a CPU it does anyway: what would start another thread is switched off."""
    threads: list[int] = []
    switches: list[bool] = []

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        switches.append(torch._C._is_multithreading_enabled())
        return weighed(_Passing.apply(x, threads), weight)

    made = ready(subject(call, metrics=BOTH))
    threads.clear()
    switches.clear()  # of what is verified, which is not timed
    made.warm_up(0.0)
    turn(made)
    made.counted()
    assert len(threads) == len(switches) >= 1 + CALLS
    assert set(threads) == {threading.get_ident()}
    assert not any(switches)
    assert torch._C._is_multithreading_enabled(), "and a caller's are as they were"


def test_a_call_that_spoils_the_gradient_it_is_given_is_wrong(subject: Make) -> None:
    class Spoils(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
            return y.clone()

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
            given = dy.clone()
            dy.zero_()
            return given

    made = subject(lambda x, weight: Spoils.apply(weighed(x, weight)))
    with pytest.raises(WrongResultError, match="changed the upstream gradient of y"):
        made.verify()


@pytest.mark.parametrize("how", [{"case": 1}, {"dtype": "bf16"}], ids=str)
def test_other_inputs_have_another_digest(subject: Make, how: dict[str, Any]) -> None:
    assert subject().input_digest() == subject().input_digest()
    assert subject(**how).input_digest() != subject().input_digest()
