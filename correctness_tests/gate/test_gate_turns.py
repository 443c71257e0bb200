"""A slowdown of some calls only is found, equal sides are not stopped for their noise, and results
that are kept by the values of their inputs are found."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from correctness_tests.support.contenders import weighed
from correctness_tests.support.gate_fakes import SECONDS, Script
from correctness_tests.support.gate_subjects import Make, ready
from tinyllama.harness.gate import turns
from tinyllama.harness.gate.decision import LOOKS
from tinyllama.harness.gate.pair import BASE, CANDIDATE, Effort
from tinyllama.harness.gate.subject import DEVICE, SEEDS
from tinyllama.harness.measure.op_contender import WrongResultError
from tinyllama.harness.records.verdict import Outcome

TESTS = 82  # figures of a merge on the H200
EFFORT = Effort(pairs=10, repeated=10, first=0.0)


def slow_often(share: float, by: float) -> list[dict[str, float]]:
    """Ten turns, of which some are slower."""
    return [{DEVICE: by if place < share * 10 else 1.0} for place in range(10)]


def test_an_excess_is_of_the_mean_over_the_median() -> None:
    assert turns.excess(slow_often(0.0, 9.0), DEVICE) == 0.0
    assert turns.excess(slow_often(0.2, 1.5), DEVICE) == pytest.approx(math.log(1.1))
    means = [{DEVICE: 1.0, turns.MEAN + DEVICE: 1.1}] * 4
    assert turns.excess(means, DEVICE) == pytest.approx(math.log(1.1)), "of the turns' own calls"
    interrupted = turns.excess(slow_often(0.1, 1e6), DEVICE)
    assert interrupted == pytest.approx(math.log(1.1)), "one turn counts at most twice"
    assert turns.mean_call([1.0, 1.0, 1.5, 9.0]) == pytest.approx(5.5 / 4)


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


def test_few_blocks_that_look_slow_are_followed_by_more() -> None:
    assert turns.suspect([0.09, 0.1, 0.08, 0.11])
    assert not turns.suspect([0.01, 0.0, -0.01, 0.0])
    assert not turns.suspect([0.5, -0.4, 0.02, 0.1]), "noise"


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_a_share_of_slow_turns_is_slower_though_the_median_is_the_same(share: float) -> None:
    script, calls = Script("a", noise=0.0), [0]

    def turn(name: str) -> dict[str, float]:
        calls[0] += 1
        slow = 1.5 if share and calls[0] % round(1 / share) == 0 else 1.0
        return {metric: seconds * slow for metric, seconds in SECONDS.items()}

    script.on(CANDIDATE, "turn", turn)
    found = script.run(effort=EFFORT)["a"]
    if not share:
        assert found.outcome is Outcome.SAME
        return
    assert found.outcome is Outcome.SLOWER
    assert "device_seconds: a share of its turns is slower: the mean call by +1" in found.text
    assert "device_seconds +0.00%" in found.text
    assert script.session.report()["benchmarks"]["a"]["slow_turns"][DEVICE]


def test_a_suspect_benchmark_takes_more_blocks_before_it_is_the_same() -> None:
    """A few slow turns in each of the first four blocks, and none later."""
    script, calls = Script("a", noise=0.0), [0]

    def turn(name: str) -> dict[str, float]:
        calls[0] += 1
        by = {2: 1.1, 3: 1.6, 4: 1.3, 5: 1.7}.get(script.launches, 1.0)
        slow = by if calls[0] % 5 == 0 else 1.0
        return {metric: seconds * slow for metric, seconds in SECONDS.items()}

    script.on(CANDIDATE, "turn", turn)
    found = script.run(effort=EFFORT)["a"]
    assert found.outcome is Outcome.SAME
    assert "in 4 blocks" not in found.text


# -- values that no process has seen -------------------------------------------------------------


@pytest.mark.parametrize("side", [BASE, CANDIDATE])
def test_a_side_that_is_slower_on_new_values_gives_no_time(side: str) -> None:
    script = Script("a", "b")
    asked: list[tuple[str, int]] = []

    def turn(worker: Any, name: str, seed: int = 0) -> dict[str, float]:
        asked.append((worker.tree.name, seed))
        slow = 2.0 if seed and (worker.tree.name, name) == (side, "a") else 1.0
        return {metric: seconds * slow for metric, seconds in SECONDS.items()}

    script._turn = turn  # type: ignore[method-assign]
    found = script.run()
    assert found["a"].outcome is Outcome.MISSING
    assert f"the {side} takes at least 2 times as long on new values" in found["a"].text
    assert found["b"].outcome is Outcome.SAME
    seeds = [seed for _, seed in asked if seed]
    assert len(set(seeds)) == len(seeds) >= 2 + turns.TRIES, "each is drawn anew"


def test_one_turn_that_was_interrupted_is_taken_again() -> None:
    took = [1.0, 9.0, 1.0, 1.0]
    turns.check_new_values("base", lambda *seed: {DEVICE: took.pop(0)})
    assert not took


def test_fresh_values_are_held_to_eager_and_leave_the_others_as_they_were(subject: Make) -> None:
    seen: list[float] = []

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.append(float(x.detach().flatten()[0]))
        return weighed(x, weight)

    made = ready(subject(call))
    made.gated_turn()
    known = set(seen)
    seen.clear()
    made.fresh_turn(12345)
    assert len(set(seen)) == 2
    assert not set(seen) & known
    seen.clear()
    made.gated_turn()
    assert set(seen) == known


def test_results_that_are_kept_by_a_few_values_are_quick_on_known_ones_alone(
    subject: Make,
) -> None:
    kept: dict[float, torch.Tensor] = {}
    computed = [0]

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        key = float(x.detach().flatten()[0])
        if key not in kept:
            computed[0] += 1
            kept[key] = weighed(x.detach(), weight.detach())
        return kept[key] + (weighed(x, weight) - weighed(x, weight).detach())

    made = ready(subject(call))
    made.gated_turn()
    computed[0] = 0
    made.gated_turn()
    assert computed[0] == 0
    made.fresh_turn(777)
    assert computed[0] == SEEDS, "which takes time, and is seen by `check_new_values`"


def test_an_answer_for_the_two_known_seeds_is_wrong_on_new_values(subject: Make) -> None:
    known: set[float] = set()
    learning = [True]

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        key = float(x.detach().flatten()[0])
        if learning[0]:
            known.add(key)
        return weighed(x, weight) * (1.0 if key in known else 0.0)

    made = ready(subject(call))
    learning[0] = False
    made.gated_turn()
    with pytest.raises(WrongResultError, match="from what was verified"):
        made.fresh_turn(31)
    made.gated_turn()
