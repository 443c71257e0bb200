"""A slowdown of some calls only is found, equal sides are not stopped for their noise, and the
results of turns are right on values that nobody has seen."""

import itertools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from correctness_tests.support.contenders import weighed
from correctness_tests.support.gate_fakes import SECONDS, Script, wrong
from correctness_tests.support.gate_subjects import Make, held, ready, turn
from tinyllama.harness.check.evaluate import copied
from tinyllama.harness.gate import turns
from tinyllama.harness.gate.decision import LOOKS
from tinyllama.harness.gate.pair import BASE, CANDIDATE, Effort
from tinyllama.harness.gate.proven import _tensors
from tinyllama.harness.gate.subject import CALLS, DEVICE, Subject
from tinyllama.harness.gate.verified import Proof
from tinyllama.harness.measure.op_contender import Timed, WrongResultError
from tinyllama.harness.records.verdict import Outcome, Verdict

TESTS = 82  # figures of a merge on the H200
EFFORT = Effort(pairs=10, repeated=10, first=0.0)


def merges(
    calls: int, noise: float, hiccups: float, count: int, *, slow: str = "", seed: int = 0
) -> Any:
    """Excesses (merges, 20 blocks) of turns of some calls with lognormal noise, of which some are
    interrupted on either side. slow: of the candidate's calls, each fifth or a random fifth is 50%
    slower."""
    random = np.random.default_rng(seed)
    took = np.exp(random.normal(0, noise, (2, count, LOOKS[-1], 20, calls)))
    took[random.random(took.shape) < hiccups] *= 3
    shape = took[1].shape
    if slow == "each":
        phase = random.integers(5, size=(count, LOOKS[-1], 1))
        place = (np.arange(20 * calls) + phase) % 5 == 0
        took[1][place.reshape(shape)] *= 1.5
    elif slow == "random":
        took[1][random.random(shape) < 0.2] *= 1.5
    fastest = took.min(axis=-1)
    mean = np.minimum(took, turns.MOST * fastest[..., None]).mean(axis=-1)
    middle = np.median(fastest, axis=-1, keepdims=True)
    base, candidate = np.log(np.minimum(mean / middle, turns.MOST).mean(axis=-1))
    return candidate - base


def stopped(excesses: Any) -> int:
    """The blocks after which a merge is stopped; 0: it is not."""
    return next((n for n in LOOKS if turns.slower(list(excesses[:n]), TESTS)), 0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("calls", "noise", "hiccups", "least"),
    [(1, 0.01, 0.0, 0.9), (1, 0.05, 0.0, 0.8), (6, 0.05, 0.02, 0.99), (6, 0.1, 0.02, 0.9)],
)
def test_a_fifth_of_the_calls_is_found_and_equal_sides_are_not_stopped(
    calls: int, noise: float, hiccups: float, least: float
) -> None:
    """A turn of device time is one call, one of host time six."""
    assert not any(map(stopped, merges(calls, noise, hiccups, 500)))
    for slow, wanted in (("each", 0.99), ("random", least)):
        found = [stopped(one) > 0 for one in merges(calls, noise, hiccups, 200, slow=slow)]
        assert sum(found) >= wanted * len(found), (slow, sum(found))


def slowed(script: Script, by: Callable[[int], float]) -> Verdict:
    """Where the candidate's n-th turn takes `by(n)` times as long."""
    numbers = itertools.count(1)

    def turn(name: str) -> dict[str, float]:
        slow = by(next(numbers))
        return {metric: seconds * slow for metric, seconds in SECONDS.items()}

    script.on(CANDIDATE, "turn", turn)
    return script.run(effort=EFFORT)["a"]


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_a_share_of_slow_turns_is_slower_though_the_median_is_the_same(share: float) -> None:
    script = Script("a", noise=0.0)
    found = slowed(script, lambda n: 1.5 if share and n % round(1 / share) == 0 else 1.0)
    if not share:
        assert found.outcome is Outcome.SAME
        return
    assert found.outcome is Outcome.SLOWER
    assert "device_seconds: a share of its turns is slower: the mean call by +1" in found.text
    assert "device_seconds +0.00%" in found.text
    assert script.session.report()["benchmarks"]["a"]["slow_turns"][DEVICE]


def test_a_suspect_benchmark_takes_more_blocks_before_it_is_the_same() -> None:
    """A few slow turns in each of the first four blocks, and none later."""
    script, by = Script("a", noise=0.0), {2: 1.1, 3: 1.6, 4: 1.3, 5: 1.7}
    found = slowed(script, lambda n: by.get(script.launches, 1.0) if n % 5 == 0 else 1.0)
    assert found.outcome is Outcome.SAME
    assert "in 4 blocks" not in found.text


# -- values that no process has seen, and what turns give on them --------------------------------


def seeds_of(script: Script, method: str) -> list[tuple[int, str, int]]:
    """Launch, side and seed of each time that a method was asked."""
    return [(at, side, a[1]) for at, side, m, a in script.asked if m == method]


def test_both_sides_have_the_same_new_values_in_each_pair_of_turns() -> None:
    script = Script("a", noise=2e-4)
    script.run(effort=EFFORT)
    each = seeds_of(script, "turn")
    for launch in {launch for launch, *_ in each}:
        base, candidate = (
            [seed for at, of, seed in each if (at, of) == (launch, side)]
            for side in (BASE, CANDIDATE)
        )
        assert base == candidate
        assert len(set(base)) == 1 + EFFORT.pairs
    assert len({seed for *_, seed in each}) == LOOKS[0] * (1 + EFFORT.pairs)


@pytest.mark.parametrize("alike", [True, False])
def test_in_each_block_calls_are_held_that_are_chosen_when_its_turns_are_over(alike: bool) -> None:
    script = Script("a", noise=2e-4)
    if alike:
        for side in (BASE, CANDIDATE):
            script.on(side, "verify", [{"y": Proof(1, (1.0,) * 8, 0.1, (1.0,) * 8)}])
    script.run(effort=EFFORT)
    order = [(at, m) for at, _, m, _ in script.asked if m in ("turn", "notes", "hold")]
    for launch in {at for at, _ in order}:
        assert [m for at, m in order if at == launch] == [
            *["turn"] * 2 * (1 + EFFORT.pairs),
            *["notes"] * 2,
            *["hold"] * (3 if alike else 4),
        ]
        taken = {seed for at, _, seed in seeds_of(script, "turn") if at == launch}
        held = [(of, a) for at, of, m, a in script.asked if (at, m) == (launch, "hold")]
        assert {args[1] for _, args in held} <= taken
        assert {(of, args[3]) for of, args in held} == {
            (BASE, False),
            (CANDIDATE, False),
            (CANDIDATE, True),
        }
    chosen = {(args[1], args[2]) for _, _, m, args in script.asked if m == "hold"}
    assert len(chosen) > LOOKS[0], "others in each block"


def test_calls_that_differ_between_sides_of_the_same_bits_are_compared_with_float64() -> None:
    script = Script("a", noise=2e-4)
    for side, last in ((BASE, 4), (CANDIDATE, 9)):
        script.on(side, "verify", [{"y": Proof(1, (1.0,) * 8, 0.1, (1.0,) * 8)}])
        script.on(side, "notes", [[1, 2], [3, last]])
    script.run()
    held = [(at, side, args[2:]) for at, side, m, args in script.asked if m == "hold"]
    for launch in {at for at, *_ in held}:
        both = [(side, how) for at, side, how in held if at == launch][3:]
        assert both == [(BASE, (1, True)), (CANDIDATE, (1, True))], "the second call of its turn"


@pytest.mark.parametrize("side", [BASE, CANDIDATE])
def test_a_side_whose_held_call_is_wrong_has_a_wrong_result(side: str) -> None:
    script = Script("a", "b", noise=2e-4)
    script.on(side, "hold", wrong("a"), "a", launch=3)
    found = script.run()
    assert found["a"].outcome is Outcome.WRONG_RESULT
    assert side in found["a"].text
    assert found["b"].outcome is Outcome.SAME


OPS_TRIED = ["embedding", "adamw", "rope", "rms_norm"]


@pytest.mark.parametrize("op", OPS_TRIED)
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_values_of_turns_are_near_known_ones_and_the_same_for_one_seed(
    op: str, layout: str
) -> None:
    """Integers, single numbers and the gaps between strided elements stay as they are."""
    both = [
        Subject(Timed(op, "eager", 0, "fp32", layout), "cpu", "tinyllama.ops", ()) for _ in "ab"
    ]
    shown: list[list[torch.Tensor]] = []
    for seed, made in ((3, both[0]), (3, both[1]), (4, both[0])):
        with made._values_of(seed, 2):
            made._give(made.passes[-1])
            shown.append([memory(one) for one in _tensors(made.inputs)])
            known, now = [*_tensors(made._master())], [*_tensors(made.inputs)]
    assert all(map(torch.equal, shown[0], shown[1])), "for both sides"
    assert not all(map(torch.equal, shown[0], shown[2]))
    for value, of in zip(now, known, strict=True):
        gaps = copied(of)
        assert (value.shape, value.stride()) == (of.shape, of.stride())
        if of.dtype.is_floating_point and of.numel() > 1:
            assert not torch.equal(value, of)
            assert ((value - of).abs() <= 0.0626 * of.abs()).all()
            gaps.copy_(value)
        assert torch.equal(memory(gaps), memory(value))


def memory(value: torch.Tensor) -> torch.Tensor:
    """A copy of all bytes, gaps too."""
    return torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage()).clone()


# -- saboteurs: right where they are verified, and quick in turns --------------------------------


class ByAddress:
    """Remembers its output for the address of its input."""

    def __init__(self) -> None:
        self.kept: dict[tuple[int, int], torch.Tensor] = {}
        self.learning, self.computed = True, 0

    def key(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[int, int]:
        key = x.data_ptr(), weight.data_ptr()
        if self.learning:
            self.kept.pop(key, None)
        return key

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        key = self.key(x.detach(), weight.detach())
        if key not in self.kept:
            self.computed += 1
            self.kept[key] = weighed(x.detach(), weight.detach())
        return self.kept[key]


class FirstValues(ByAddress):
    """Is right on the first values that it sees, and remembers for all others."""

    def key(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[int, int]:
        return int(self.learning and self.computed), 0


class ByValues(ByAddress):
    """Remembers by a few values of its input, which costs half of what it computes."""

    def key(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[int, int]:
        return int(1e6 * x.flatten()[0]), int(1e6 * weight[0])


@pytest.mark.parametrize("saboteur", [ByAddress, FirstValues])
def test_what_is_remembered_is_found_though_it_is_right_where_it_is_verified(
    subject: Make, saboteur: Any
) -> None:
    call = saboteur()
    made = ready(subject(lambda x, w: _with_gradients(call, x, w)))
    turn(made)
    call.learning, before = False, call.computed
    turn(made)
    assert call.computed == before, "it is quick, and without `hold` nobody sees it"
    with pytest.raises(WrongResultError, match=r"y: .* from what eager gives"):
        held(made)


@pytest.mark.long
def test_what_is_remembered_by_values_is_of_no_use(subject: Make) -> None:
    call = ByValues()
    made = ready(subject(lambda x, w: _with_gradients(call, x, w)))
    for _ in range(3):
        before = call.computed
        held(made)
        assert call.computed - before >= 1 + CALLS


def test_timed_calls_have_gradients_and_a_harness_so_others_are_only_for_review(
    subject: Make,
) -> None:
    """What a provider does without either is not timed: `docs/TRUST.md` says so."""
    met: set[tuple[bool, bool]] = set()

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        met.add((torch.is_grad_enabled(), "tinyllama.harness.gate.subject" in sys.modules))
        return weighed(x, weight)

    made = ready(subject(call))
    met.clear()
    turn(made)
    assert met == {(True, True)}


def _with_gradients(call: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The output of a call, with the right gradients."""
    y = weighed(x, weight)
    given: torch.Tensor = call(x.detach(), weight.detach())
    return y + (given - y.detach())
