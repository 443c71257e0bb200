"""What is timed inside a worker: right results, on values that are new in each timed call."""

import contextlib
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

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
from tinyllama.harness.gate import subject as module
from tinyllama.harness.gate import verified
from tinyllama.harness.gate.proven import SEEDS
from tinyllama.harness.gate.subject import CALLS, DEVICE, HOST, Subject
from tinyllama.harness.measure.op_contender import WrongResultError

BOTH = (DEVICE, HOST)
RESULTS = {"y", "grad x", "grad weight"}


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


def test_a_shape_that_broadcasts_is_no_result(subject: Make) -> None:
    made = subject(lambda x, w: weighed(x, w))
    made._one_call = lambda seed: {  # type: ignore[method-assign]
        name: value.unsqueeze(0) for name, value in Subject._one_call(made, seed).items()
    }
    with pytest.raises(WrongResultError, match="unlike eager's"):
        made.verify()


def test_an_error_that_overflows_allows_nothing(
    subject: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = subject()
    monkeypatch.setattr(verified, "SLACK", torch.inf)
    with pytest.raises(WrongResultError, match="inf"):
        made.verify()


# -- wrong where it is timed ------------------------------------------------------------------


def test_a_rehearsal_makes_what_turns_need(subject: Make) -> None:
    made = ready(subject())
    made.rehearse()
    places = {place: id(one) for place, one in made.places.items()}
    assert not made.noted
    turn(made)
    assert len(places) == 1 + CALLS
    assert {place: id(one) for place, one in made.places.items()} == places


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


def test_each_projection_of_what_was_verified_must_be_near(subject: Make) -> None:
    loose = {"deterministic": frozenset[str]()}
    proofs = subject(**loose).verify()
    proof = proofs[0]["y"]
    for place in range(len(proof.projections)):
        moved = list(proof.projections)
        moved[place] += 17 * proof.allowed
        proofs[0]["y"] = replace(proof, projections=tuple(moved))
        with pytest.raises(WrongResultError, match="y: it is not near what was verified"):
            subject(**loose).expect(proofs)


def test_a_profile_is_of_all_passes(subject: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = subject()

    def launches(run: Callable[[], None], device: torch.device) -> SimpleNamespace:
        run()
        return SimpleNamespace(by_name={"kernel": (1, 1e-6)})

    monkeypatch.setattr(module, "launches", launches)
    assert made.profile() == {"kernel": (1, 1e-6)}
    assert set(made._collected()) == RESULTS


def test_a_result_that_was_proven_and_is_not_given_is_wrong(subject: Make) -> None:
    proofs = subject().verify()
    for proof in proofs:
        proof["grad more"] = proof["y"]
    with pytest.raises(WrongResultError, match="grad more"):
        subject().expect(proofs)


def test_nothing_is_timed_before_it_is_expected(subject: Make) -> None:
    made = subject()
    made.verify()
    with pytest.raises(ValueError, match="expect what was verified before a turn"):
        turn(made)


def test_the_work_that_is_added_is_read_from_all_readings_but_the_first() -> None:
    read = iter([100.0, 1.0, 2.0, 3.0, 4.0, 50.0])
    prepared: list[str] = []

    def reading(run: object, before: Callable[[], object]) -> SimpleNamespace:
        before()
        return SimpleNamespace(device=next(read))

    made = SimpleNamespace(
        **{"share": 0.5, "clocked": True, "extra": 0.0, "passes": ("forward", "backward")},
        **{"clock": SimpleNamespace(read=reading), "_run": None, "_prepare": prepared.append},
    )
    Subject._calibrate(made)  # type: ignore[arg-type]
    assert made.extra == 1.5
    assert prepared == ["backward"] * 6


@pytest.mark.parametrize(
    ("extra", "share", "clocked", "added"),
    [
        (0.0, 0.0, True, []),
        (1.5, 0.5, True, ["spin 1.5"]),
        (0.0, 0.5, True, []),  # as it is read
        (0.0, 0.5, False, ["busy 2.0"]),
    ],
)
def test_work_is_added_on_the_device_or_else_on_the_host(
    extra: float, share: float, clocked: bool, added: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    clock = SimpleNamespace(
        queue=SimpleNamespace(spin=lambda seconds: done.append(f"spin {seconds}"))
    )
    made = Subject.__new__(Subject)
    vars(made).update(extra=extra, share=share, clocked=clocked, clock=clock)
    times = iter([10.0, 14.0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(times))
    monkeypatch.setattr(module, "keep_busy", lambda seconds: done.append(f"busy {seconds}"))
    monkeypatch.setattr(Subject.__mro__[1], "_run", lambda self: done.append("call"))
    made._run()
    assert done == ["call", *added]


def test_a_result_may_be_as_far_as_its_limit() -> None:
    one = torch.ones(3)
    verified.near(one, one, 0.0)
    with pytest.raises(ValueError, match="from what eager gives"):
        verified.near(one + 1e-3, one, 1e-4)


def test_one_rounding_of_the_result_s_own_dtype_is_allowed() -> None:
    plain = torch.ones(4, 8, dtype=torch.bfloat16)
    oracle = plain.double()
    eps = torch.finfo(torch.bfloat16).eps
    verified.proven(plain + eps, plain, oracle, 1.0)
    with pytest.raises(ValueError, match="error"):
        verified.proven(plain + 16 * eps, plain, oracle, 1.0)


@pytest.mark.parametrize("slack", [1.0, 3.0])
@pytest.mark.parametrize(
    ("rows", "times", "wrong"),
    [
        (1, 0.9, None),
        (1, 1.1, " in a row > "),
        (4, 0.49, None),
        (4, 0.55, r"error \S+ > "),  # of the whole alone: its norm is twice that of a row
    ],
)
def test_an_error_is_held_to_its_bound_by_rows_and_as_a_whole(
    rows: int, times: float, wrong: str | None, slack: float
) -> None:
    """Of results whose first row alone is not zero, so that both norms are the same."""
    plain = torch.zeros(4, 8, dtype=torch.float64)
    plain[0] = 1.0
    bound = 4.0 * slack * torch.finfo(torch.float64).eps * math.sqrt(8)
    value = plain.clone()
    value[:rows, 0] -= times * bound  # below 1, numbers lie closer together
    given = (value, plain, plain, slack)
    if wrong:
        with pytest.raises(ValueError, match=wrong):
            verified.proven(*given)
    else:
        assert verified.proven(*given).allowed == pytest.approx(bound)


def test_the_bound_that_is_kept_is_that_of_the_whole() -> None:
    plain = torch.ones(4, 8)
    off = plain.double() + 1e-3
    assert verified.proven(plain, plain, off, 2.0).allowed == pytest.approx(8e-3 * math.sqrt(32))


def test_what_was_verified_is_kept_with_twice_its_allowed_error(subject: Make) -> None:
    made = subject()
    proofs = made.verify()
    made.expect(proofs)
    assert list(made.expected) == list(range(SEEDS))
    for seed, one in made.expected.items():
        assert one.allowed == {name: 2 * proof.allowed for name, proof in proofs[seed].items()}
        assert all(value > 0 for value in one.allowed.values())
        assert set(one.results) == RESULTS


def test_the_last_pass_is_run_in_whatever_the_gate_asks_for(
    subject: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, asked = subject(), []

    @contextlib.contextmanager
    def watched() -> Any:
        yield []

    counted = SimpleNamespace(counts={"kernels": 2, "bytes": None}, by_name={"k": (1, 0.5)})
    reading = SimpleNamespace(device=2.0)

    def read(run: Any, before: Callable[[], None]) -> Any:
        before()
        return reading

    stubs: dict[str, Any] = {
        "_prepare": lambda name, layout="": asked.append(name),
        "_give": lambda name, layout="": asked.append(name),
        "_run": lambda: None,
        "_check": lambda: None,
        "_peak": lambda: 7,
        "_read": lambda name: SimpleNamespace(device=2.0, host=1.0),
        "_values_of": contextlib.nullcontext,
        "expected": {0: None},
        "_allocated": lambda: 0,
        "_forget": lambda: None,
        "_note_all": lambda calls: None,
        "clock": SimpleNamespace(read=read),
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(made, name, stub)
    monkeypatch.setattr(module, "launches", lambda run, device: counted)
    monkeypatch.setattr(module, "launched", watched)
    monkeypatch.setattr(module, "synchronize", lambda device: None)
    monkeypatch.setattr(Subject, "passes", ("first", "second", "last"))

    def told(ask: Callable[[], Any]) -> tuple[Any, list[str]]:
        asked.clear()
        return ask(), list(asked)

    made.device = torch.device("cpu")
    assert told(made.launched) == ([], []), "there are no kernels on a CPU"
    assert told(made.counted) == ({}, [])
    made.device, made.kept_bytes = torch.device("cuda"), 3
    last = ["last"]
    assert told(made.launched) == ([], last)
    counts = {"peak_bytes": 7, "kept_bytes": 3, "kernels": 2}
    assert told(made.counted) == (counts, last * 2)
    assert told(made.profile) == ({"k": (1, 0.5)}, last)
    for ask in (made.run_once, made.ready):
        assert told(ask)[1] == last
    assert told(lambda: made.compile_layouts(["strided"]))[1] == last * 2
    assert told(made._repeat)[1] == last * (1 + CALLS)
    made.clocked, made.repeated = True, None
    assert told(made.rehearse)[1] == last
    made.slow_down(0.25)
    assert told(made._calibrate)[1] == last * 6
    assert made.extra == 0.5
    assert told(made._calibrate)[1] == [], "it is known by then"
    for adding in (made.counted, made.profile, lambda: made.gated_turn(0)):
        made.extra = 0.0
        adding()
        assert made.extra == 0.5, "whatever is asked for first reads it"


@pytest.mark.parametrize(
    ("device", "metrics", "clocked", "repeated"),
    [
        ("cpu", BOTH, False, DEVICE),
        ("cpu", (DEVICE,), False, DEVICE),
        ("cuda", BOTH, True, HOST),
        ("cuda", (DEVICE,), True, None),
        ("cuda", (HOST,), False, HOST),
    ],
)
def test_a_gpu_s_time_is_read_by_its_clock_and_all_other_in_repeated_calls(
    device: str,
    metrics: tuple[str, ...],
    clocked: bool,
    repeated: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def made(self: Any, timed: object, device: str, *_: object) -> None:
        self.device, self.clock = torch.device(device), SimpleNamespace()

    monkeypatch.setattr(Subject.__mro__[1], "__init__", made)
    timed: Any = None
    one = Subject(timed, device, "tinyllama.ops", (), metrics)
    assert (one.clocked, one.repeated) == (clocked, repeated)


@pytest.mark.parametrize(("device", "allocated"), [("cpu", 0), ("cuda", 70)])
def test_bytes_that_stay_allocated_are_those_of_a_gpu(
    device: str, allocated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 70)
    one = Subject.__new__(Subject)
    one.device = torch.device(device)
    assert one._allocated() == allocated
