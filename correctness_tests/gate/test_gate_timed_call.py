"""What is timed inside a worker: two readings of each metric, on values that are new in each turn,
of results that are right."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch

from correctness_tests.support.contenders import FILES, PACKAGE, Call, Turning, weighed
from correctness_tests.support.queues import KERNEL, US, SimulatedQueue
from tinyllama.harness.gate.metric import ALL_WORK, CALL, DEVICE, HOST
from tinyllama.harness.gate.timed_call import CALLS, TimedCall
from tinyllama.harness.gate.verification import Proof, hold_to_base
from tinyllama.harness.measure.clock import Clock
from tinyllama.harness.measure.op_contender import Timed, ops_of
from tinyllama.harness.measure.right_results import WrongResultError

NUMBER = itertools.count(1)
Make = Callable[..., TimedCall]
Test = TypeVar("Test", bound=Callable[..., None])


def reads_device_time(test: Test) -> Test:
    """Marks a test of subjects that give DEVICE: of a GPU it would be other workers' time too, so
    it runs where the GPU is its own, as with ``-m gpu``; on a CPU always."""
    marked: Test = pytest.mark.gpu(pytest.mark.usefixtures("own_gpu")(test))
    return marked


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


# -- results --------------------------------------------------------------------------------------

WRONG: dict[str, Call] = {
    "zeros": lambda x, w: weighed(x, w) * 0,
    "2% too large": lambda x, w: weighed(x, w) * 1.02,
    "nan": lambda x, w: weighed(x, w) + torch.where(x == x.max(), torch.nan, 0.0),
    "infinite": lambda x, w: weighed(x, w) + torch.where(x == x.max(), torch.inf, 0.0),
    "the last row": lambda x, w: torch.cat((weighed(x, w)[:-1], 0 * x[-1:])),
    "rows swapped": lambda x, w: weighed(x.flip(0), w),
    "no gradient of weight": lambda x, w: weighed(x, w.detach()),
    "half the gradient of weight": lambda x, w: weighed(x, w / 2 + w.detach() / 2),
    "a row of the gradient of x": lambda x, w: weighed(
        torch.cat((x[:5], x[5:6].detach(), x[6:])), w
    ),
    "another type": lambda x, w: weighed(x.double(), w.double()),
    "12 times eager's error": lambda x, w: weighed(x, w) * (1 + 12 * 2.0**-24),
}


@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.parametrize("when", ["before", "where it is timed"])
def test_a_wrong_result_is_found_before_it_is_timed_and_in_a_timed_call(
    subject: Make, fault: str, when: str
) -> None:
    call = Turning(WRONG[fault])
    call.turned = when == "before"
    if when == "before":
        with pytest.raises(WrongResultError):
            subject(call).verify(next(NUMBER))
        return
    timed_call = subject(call)
    verified(timed_call)
    call.turned = True
    with pytest.raises(WrongResultError):
        verified(timed_call)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_one_wrong_row_among_32768_is_found(subject: Make, dtype: str) -> None:
    """Over the whole tensor its error is a third of what bf16's rounding allows."""
    with pytest.raises(WrongResultError, match=r"y: at \[32767, .*row error .* > allowed"):
        subject(WRONG["the last row"], dtype, case=1).verify(next(NUMBER))


def test_a_factor_of_1_01_shows_in_bfloat16(subject: Make) -> None:
    with pytest.raises(WrongResultError, match=r"y: at .* > allowed"):
        subject(lambda x, w: 1.01 * weighed(x, w), "bf16", case=1).verify(next(NUMBER))


@pytest.mark.parametrize("place", range(CALLS))
def test_the_judge_chooses_which_call_is_held_to_float64(subject: Make, place: int) -> None:
    calls, begun = itertools.count(), list[bool]()

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wrong = bool(begun) and next(calls) % CALLS == place
        return weighed(x, weight) * (1.02 if wrong else 1.0)

    timed_call = subject(call)
    begun.append(True)
    verified(timed_call, call_number=place + 1)
    with pytest.raises(WrongResultError, match="a timed call: y: at "):
        verified(timed_call, call_number=place)


class Remembers:
    """Gives the first result for an address, or the first one of all, or that of the last call."""

    def __init__(self, key: str) -> None:
        self.key, self.results = key, dict[Any, torch.Tensor]()

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = weighed(x, weight)
        key = x.data_ptr() if self.key == "address" else 0
        first = self.results.setdefault(key, y.detach())
        if self.key == "last":
            self.results[key] = y.detach()
        return y + (first - y.detach())


@pytest.mark.parametrize("key", ["address", "first", "last"])
def test_a_remembered_result_is_wrong_since_values_are_new(subject: Make, key: str) -> None:
    call = Turning(Remembers(key))
    timed_call = subject(call)
    call.turned = True
    turn(timed_call)
    with pytest.raises(WrongResultError, match="a timed call: y: at "):
        verified(timed_call)


class Late(torch.Tensor):
    """It is computed when it is read."""


@pytest.mark.parametrize("late", ["y", "gradient"])
def test_a_result_that_is_computed_when_it_is_read_is_wrong(subject: Make, late: str) -> None:
    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if late == "gradient":
            x.register_hook(lambda gradient: gradient.as_subclass(Late))
        y = weighed(x, w)
        return y.as_subclass(Late) if late == "y" else y

    with pytest.raises(WrongResultError, match="is a Late, not a torch"):
        verified(subject(call))


class Spoils(torch.autograd.Function):
    """Writes into the gradient that it is given."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        gradient = dy.clone()
        dy.zero_()
        return gradient


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x, w: weighed(x, w.clone()) * w.detach().zero_().add_(1), "its input weight"),
        (lambda x, w: Spoils.apply(weighed(x, w)), "the upstream gradient of y"),
    ],
    ids=["an input", "a gradient"],
)
def test_a_call_that_spoils_what_it_is_given_is_wrong(subject: Make, call: Call, said: str) -> None:
    with pytest.raises(WrongResultError, match=f"changed {said}"):
        subject(call).verify(next(NUMBER))


def test_a_result_with_other_last_bits_is_right(subject: Make) -> None:
    verified(subject(nudged))


# -- against the base -----------------------------------------------------------------------------


def proofs(subject: Make, call: Call = weighed, seed: int = 3) -> dict[str, Proof]:
    return subject(call).verify(seed)


def test_a_candidate_is_held_to_the_bases_reference_on_the_same_values(subject: Make) -> None:
    base = proofs(subject)
    hold_to_base(base, proofs(subject, nudged))
    wrong_base = subject(WRONG["2% too large"])
    hold_to_base(wrong_base.reference(3), proofs(subject, nudged))
    with pytest.raises(WrongResultError, match=r"about .* from the base's reference"):
        hold_to_base(base, proofs(subject, seed=4))
    with pytest.raises(ValueError, match="grad x: the candidate lacks it"):
        hold_to_base(base, {"y": base["y"], "grad weight": base["grad weight"]})
    with pytest.raises(ValueError, match="has it of other inputs"):
        hold_to_base(base, {**base, "y": replace(base["y"], inputs=1)})


@pytest.mark.parametrize(
    ("change", "right"),
    [
        (lambda y: y, True),
        (lambda y: y.t().contiguous().t(), False),
        (lambda y: torch.cat((y, y), dim=-1)[..., : y.shape[-1]], False),
    ],
    ids=["dense", "transposed", "a part of a larger tensor"],
)
def test_an_output_with_other_strides_than_the_bases_is_wrong(
    subject: Make, change: Any, right: bool
) -> None:
    """The copy that its consumer makes of it is not in its time."""
    base, candidate = (proofs(subject, c) for c in (weighed, lambda x, w: change(weighed(x, w))))
    if right:
        hold_to_base(base, candidate)
        return
    with pytest.raises(WrongResultError, match=r"y has the strides \(.*\), the base's"):
        hold_to_base(base, candidate)
    hold_to_base(candidate, candidate)
    hold_to_base(candidate, base)


# -- values ---------------------------------------------------------------------------------------


def test_inputs_lie_where_they_lay_in_the_turn_before(subject: Make) -> None:
    """As in a training loop, and each of a row has its own."""
    addresses: list[int] = []

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        addresses.append(x.data_ptr())
        return weighed(x, weight)

    timed_call, turns = subject(call), []
    for _ in range(3):
        addresses.clear()
        turn(timed_call)
        turns.append(list(addresses))
    assert turns[0] == turns[1] == turns[2]
    assert len(set(turns[0])) == CALLS


@pytest.mark.parametrize("how", [{"case": 1}, {"dtype": "bf16"}], ids=str)
def test_other_inputs_have_another_digest(subject: Make, how: dict[str, Any]) -> None:
    assert subject().input_digest() == subject().input_digest()
    assert subject(**how).input_digest() != subject().input_digest()


# -- times ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("took", "figure", "work"),
    [
        ([0.0, 0.03, 0.04, 0.02, 0.025, 0.05, 0.06], 0.0225, 0.225 / 7),
        ([0.3, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02], 0.02, 0.42 / 7),
    ],
    ids=["a quick first call", "a slow first call"],
)
def test_the_fastest_calls_are_the_figure_and_the_first_counts_as_work(
    subject: Make, monkeypatch: pytest.MonkeyPatch, took: list[float], figure: float, work: float
) -> None:
    left, now = list[float](), [0.0]

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        now[0] += left.pop(0) if left else 0.0
        return weighed(x, weight)

    timed_call = subject(call)
    monkeypatch.setattr("tinyllama.harness.gate.timed_call.perf_counter", lambda: now[0])
    left[:] = took
    metric = timed_call.repeated
    assert turn(timed_call) == {
        metric: pytest.approx(figure),
        f"{ALL_WORK}{metric}": pytest.approx(work),
    }


class Ends(torch.Tensor):
    """A tensor whose destructor takes 5 ms."""

    def __del__(self) -> None:
        time.sleep(5e-3)


def test_the_end_of_a_result_counts_as_work_and_not_in_the_figure(subject: Make) -> None:
    timed_call = subject(lambda x, w: weighed(x, w).as_subclass(Ends))
    seconds = turn(timed_call)
    metric = timed_call.repeated
    assert seconds[f"{ALL_WORK}{metric}"] >= 5e-3 > seconds[str(metric)]


@reads_device_time
@pytest.mark.parametrize("metrics", [(DEVICE,), (HOST,), (DEVICE, HOST)], ids=" ".join)
def test_turns_have_both_readings_of_each_metric(
    subject: Make, device: torch.device, metrics: tuple[str, ...]
) -> None:
    timed_call = subject(metrics=metrics)
    seconds = verified(timed_call, call_number=1)
    if device.type != "cpu" and DEVICE in metrics:
        assert ALL_WORK + DEVICE not in seconds
        seconds |= timed_call.gated_row(1)
    expected = (DEVICE,) if device.type == "cpu" else metrics
    assert {*seconds} - {CALL} == {name for m in expected for name in (m, ALL_WORK + m)}
    assert all(0 < value < 1 for value in seconds.values())


@pytest.mark.parametrize(("second_stream", "ends"), [(0.0, 0.0), (40 * US, 0.0), (0.0, 30 * US)])
def test_all_work_has_other_streams_and_destructors_in_it(
    second_stream: float, ends: float
) -> None:
    """On a simulated queue, in which a second stream works at the same time."""
    queue = SimulatedQueue(launch=1 * US)
    clock, calls = Clock(queue), 7
    synchronize = queue.synchronize
    stream_ends = [0.0]

    def synchronize_all() -> None:
        synchronize()
        queue.host = max(queue.host, stream_ends[0])

    queue.synchronize = synchronize_all  # type: ignore[method-assign]

    def row() -> None:
        for _ in range(calls):
            queue.call(delay=1 * US)()
            if second_stream:
                stream_ends[0] = max(queue.free, stream_ends[0]) + second_stream
            if ends:
                queue.enqueue(ends)

    seconds = clock.all_work(row, before=lambda: None)
    expected = calls * (KERNEL + ends + second_stream)
    assert seconds == pytest.approx(expected, rel=0.1, abs=3 * US)
    assert clock.read(queue.call(delay=1 * US)).device == pytest.approx(KERNEL)
