"""What is timed inside a worker: right results, on values that are new in each timed call."""

import contextlib
import itertools

import pytest
import torch

from correctness_tests.support.contenders import Call, weighed
from correctness_tests.support.gate_subjects import (
    NUMBER,
    Make,
    Turning,
    held,
    nudged,
    reads_device_time,
    ready,
    turn,
)
from tinyllama.harness.gate.subject import CALLS, DEVICE, HOST
from tinyllama.harness.measure.op_contender import WrongResultError

# -- wrong ------------------------------------------------------------------------------------

WRONG: dict[str, Call] = {
    "zeros": lambda x, w: weighed(x, w) * 0,
    "2% too large": lambda x, w: weighed(x, w) * 1.02,
    "nan": lambda x, w: weighed(x, w) + torch.where(x == x.max(), torch.nan, 0.0),
    "infinite": lambda x, w: weighed(x, w) + torch.where(x == x.max(), torch.inf, 0.0),
    "the last row": lambda x, w: torch.cat((weighed(x, w)[:-1], 0 * x[-1:])),
    "rows swapped": lambda x, w: weighed(x.flip(0), w),
    "no gradient of weight": lambda x, w: weighed(x, w.detach()),
    "half the gradient of weight": lambda x, w: weighed(x, w / 2 + w.detach() / 2),
    "another type": lambda x, w: weighed(x.double(), w.double()),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_result_is_no_proof(subject: Make, fault: str) -> None:
    made = subject(WRONG[fault])
    with pytest.raises(WrongResultError):
        made.verify()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_one_row_among_many_is_seen(subject: Make, dtype: str) -> None:
    """Of 32768; over the whole tensor its error is a third of what bf16's rounding allows."""
    made = subject(WRONG["the last row"], dtype, case=1)
    with pytest.raises(WrongResultError, match=r"y: error .* in a row"):
        made.verify()


def test_an_error_of_some_times_eagers_is_wrong(subject: Make) -> None:
    """And a single one is right: `SLACK`."""
    for errors, right in ((1, True), (12, False)):
        made = subject(lambda x, w, n=errors: weighed(x, w) * (1 + n * 2.0**-24))
        with contextlib.nullcontext() if right else pytest.raises(WrongResultError):
            made.verify()


# -- wrong where it is timed ------------------------------------------------------------------


class Late(torch.Tensor):
    """It is computed when it is read."""


@pytest.mark.parametrize("late", ["y", "gradient"])
def test_a_result_that_is_computed_when_it_is_read_gives_no_time(subject: Make, late: str) -> None:
    """Its calls would take no time, and its results would be right."""

    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if late == "gradient":
            x.register_hook(lambda gradient: gradient.as_subclass(Late))
        y = weighed(x, w)
        return y.as_subclass(Late) if late == "y" else y

    turning = Turning(call)
    made = ready(subject(turning))
    turn(made)
    turning.turned = True
    with pytest.raises(WrongResultError, match="is a Late, not a torch"):
        turn(made)


@reads_device_time
@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.parametrize(("metric", "right"), [(DEVICE, 0), (DEVICE, 3), (HOST, 3)])
def test_a_timed_call_that_is_wrong_gives_no_time(
    subject: Make, fault: str, metric: str, right: int
) -> None:
    call = Turning(WRONG[fault])
    made = ready(subject(call, metrics=(metric,)))
    for _ in range(right):
        held(made)
    call.turned = True
    with pytest.raises(WrongResultError):
        held(made)


@pytest.mark.parametrize("when", ["at once", "where it is timed"])
def test_a_result_kept_from_the_call_before_is_wrong(subject: Make, when: str) -> None:
    kept: list[torch.Tensor] = []

    def again(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = weighed(x, weight)
        kept.append(y.detach())
        return y + (kept[-2] - y.detach()) if len(kept) > 1 else y

    call = Turning(again)
    made = subject(call)
    if when == "at once":
        call.turned = True
        with pytest.raises(WrongResultError, match="y: error"):
            made.verify()
    else:
        ready(made)
        call.turned = True
        made.run_once()  # and so there is one that is kept
        with pytest.raises(WrongResultError, match="gave other results than the same call"):
            held(made)


@pytest.mark.parametrize("between", [0, 1, 2])
def test_a_result_kept_for_the_address_of_its_input_is_wrong(subject: Make, between: int) -> None:
    """Whatever number of calls there is between the turns, the device's or none."""
    kept: dict[int, torch.Tensor] = {}

    def by_address(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = weighed(x, weight)
        return y + (kept.setdefault(x.data_ptr(), y.detach()) - y.detach())

    call = Turning(by_address)
    made = ready(subject(call))
    call.turned = True
    turn(made)
    for _ in range(between):
        made._fresh()
    turn(made)  # nobody knows yet
    with pytest.raises(WrongResultError, match=r"y: .* from what eager gives"):
        held(made)


@pytest.mark.parametrize("place", range(1 + CALLS))
def test_each_of_the_repeated_calls_is_checked(subject: Make, place: int) -> None:
    count = itertools.count()
    begun: list[bool] = []

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wrong = bool(begun) and next(count) == place
        return weighed(x, weight) * (1.02 if wrong else 1.0)

    made = ready(subject(call))
    begun.append(True)
    seed = next(NUMBER)
    made.gated_turn(seed)
    for other in {*range(1 + CALLS)} - {place}:
        made.hold(seed, other, exact=False)
    with pytest.raises(WrongResultError, match="gave other results than the same call made again"):
        made.hold(seed, place, exact=False)


def test_other_bits_of_what_is_deterministic_are_wrong(subject: Make) -> None:
    proofs = subject().verify()
    assert subject(nudged).verify() != proofs, "right, and other bits"
    with pytest.raises(WrongResultError, match="y: its bits are not what was verified"):
        subject(nudged).expect(proofs)
    call = Turning(nudged)
    made, notes = ready(subject(call)), []
    for call.turned in (False, False, True):
        made.gated_turn(7)
        notes.append(made.notes(7))
    assert notes[0] == notes[1]
    assert len(set(notes[0])) == 1 + CALLS, "each call has values of its own"
    assert not set(notes[0]) & set(notes[2]), "the judge sees it"
    held(made)


def test_what_is_not_deterministic_may_have_other_bits_and_no_other_values(subject: Make) -> None:
    loose = {"deterministic": frozenset[str]()}
    proofs = subject(**loose).verify()
    made = subject(nudged, **loose)
    made.expect(proofs)
    held(made)
    made.gated_turn(7)
    assert made.notes(7) == []
    with pytest.raises(WrongResultError, match="y: it is not near what was verified"):
        subject(WRONG["2% too large"], **loose).expect(proofs)
    call = Turning(WRONG["2% too large"])
    made = ready(subject(call, **loose))
    call.turned = True
    with pytest.raises(WrongResultError, match=r"y: .* from what eager gives, allowed"):
        held(made)


def test_nothing_is_timed_before_it_is_expected(subject: Make) -> None:
    made = subject()
    made.verify()
    with pytest.raises(ValueError, match="expect what was verified before a turn"):
        turn(made)
