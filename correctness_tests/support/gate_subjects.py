"""Subjects of the gate whose provider is a call, for the specifications of them.

The fixture ``subject`` is in the folder's conftest.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch

from correctness_tests.support.contenders import FILES, PACKAGE, Call, weighed
from tinyllama.harness.gate.metric import DEVICE, HOST
from tinyllama.harness.gate.timed_call import TimedCall
from tinyllama.harness.measure.op_contender import Timed, ops_of

NUMBER = itertools.count(1)
Make = Callable[..., TimedCall]
Test = TypeVar("Test", bound=Callable[..., None])


def reads_device_time(test: Test) -> Test:
    """Marks a test of subjects that give DEVICE: of a GPU it would be other workers' time too, so
    it runs where the GPU is its own, as with ``-m gpu``; on a CPU always."""
    marked: Test = pytest.mark.gpu(pytest.mark.usefixtures("own_gpu")(test))
    return marked


class Turning:
    """A call that is right until it is told to turn."""

    def __init__(self, wrong: Call) -> None:
        self.wrong, self.turned = wrong, False

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = (self.wrong if self.turned else weighed)(x, weight)
        return result


@pytest.fixture
def subject(request: pytest.FixtureRequest, device: torch.device) -> Iterator[Make]:
    """Makes the subject of a call, ready to be asked, as a provider with these traits.

    It gives host time, unless a test that `reads_device_time` asks for others.
    """
    op = ops_of(PACKAGE, FILES)["weigh_rows"]

    def make(
        call: Call = weighed,
        dtype: str = "fp32",
        case: int = 0,
        metrics: Sequence[str] = (HOST,),
        layout: str = "contiguous",
        **traits: Any,
    ) -> TimedCall:
        assert DEVICE not in metrics or "own_gpu" in request.fixturenames, "mark the test"
        op.providers["tried"] = replace(op["eager"], name="tried", call=call, **traits)
        timed = Timed("weigh_rows", "tried", case, dtype, layout)
        timed_call = TimedCall(timed, str(device), PACKAGE, FILES, metrics)
        timed_call.run_once()
        return timed_call

    yield make
    op.providers.pop("tried", None)


def turn(timed_call: TimedCall) -> dict[str, float]:
    """What a turn on new values takes."""
    return timed_call.gated_turn(next(NUMBER))


def verified(timed_call: TimedCall, call_number: int = 0) -> dict[str, float]:
    """The same; the call of that number is held to float64."""
    seconds = timed_call.gated_turn(next(NUMBER), call_number)
    timed_call.proofs()
    return seconds


def nudged(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Right, and of the same norm; one element has another last bit."""
    y = weighed(x, weight)
    changed = y.detach().clone(memory_format=torch.contiguous_format)
    element = changed.view(-1)[3:4]
    element.copy_(
        torch.nextafter(element, torch.full_like(element, torch.inf))
    )  # and nobody waits for it
    return y + (changed - y.detach())
