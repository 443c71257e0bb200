"""The gate's rule: how often it is wrong under five kinds of noise.

A block's statistic is the median of the log ratios of pairs measured A B B A; all seeds are fixed.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tinyllama.harness.gate import sequential_test
from tinyllama.harness.gate.calibrate import critical
from tinyllama.harness.gate.metric import Series
from tinyllama.harness.gate.sequential_test import (
    CONFIRM_BLOCKS,
    FAR,
    LOOKS,
    Call,
    Floats,
    Rule,
    Spread,
    confirmed,
    decide,
    of_block,
)
from tinyllama.harness.records.verdict import Figure, Outcome

BENCHMARKS, PAIRS, HISTORY, POOL = 40, 40, 40, 20_000
LAST = LOOKS[-1]
Random = np.random.Generator


# -- noise: logarithms of seconds, (blocks, 2 sides, pairs) ------------------------------------


def steady(blocks: int, random: Random, cv: float, session: float) -> Floats:
    """Calls that vary, in a launch pair that is slow or fast as a whole."""
    calls = cv * random.standard_normal((blocks, 2, PAIRS), dtype=np.float32)
    return calls + session * random.standard_normal((blocks, 1, 1))


def quiet(blocks: int, random: Random) -> Floats:
    return steady(blocks, random, 0.01, 0.005)


def shared(blocks: int, random: Random) -> Floats:
    return steady(blocks, random, 0.03, 0.02)


def noisy(blocks: int, random: Random) -> Floats:
    calls = steady(blocks, random, 0.10, 0.04)
    spiked = random.random(calls.shape, dtype=np.float32) < 0.05
    return calls + spiked * 0.5 * random.standard_exponential(calls.shape, dtype=np.float32)


def places() -> Floats:
    """When each side's calls ran, of 2 * PAIRS places: A B B A."""
    pair = np.arange(PAIRS)
    return np.stack([2 * pair + pair % 2, 2 * pair + 1 - pair % 2])


def drift(blocks: int, random: Random) -> Floats:
    """Clocks wander by 2%, and the first calls are 2% slower."""
    at = places() / (2 * PAIRS)
    turns, start = random.uniform(0.3, 2, (blocks, 1, 1)), random.uniform(0, 7, (blocks, 1, 1))
    wander = 0.02 * np.sin(2 * np.pi * turns * at + start)
    return steady(blocks, random, 0.01, 0) + wander + 0.02 * np.exp(-10 * at)


def modes(blocks: int, random: Random) -> Floats:
    """Of the launches of each side, 30% are 3% slower from beginning to end."""
    return quiet(blocks, random) + 0.03 * (random.random((blocks, 2, 1)) < 0.3)


MODELS = (quiet, shared, noisy, drift, modes)
Model = Callable[[int, Random], Floats]


def statistics(logs: Floats) -> Floats:
    return of_block(logs[:, 1] - logs[:, 0])


def decided(blocks: Floats, rule: Rule, history: Spread) -> tuple[Any, Any]:
    """Which of many merges are SLOWER and which are green at the look that decides them."""
    slower_above, green_below = critical(blocks, rule, history)
    slower = slower_above < 0
    return slower, ~slower & (green_below > 0)


# -- the error rates ---------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_no_merge_is_stopped_falsely_and_no_slowdown_of_5_percent_is_green(model: Model) -> None:
    """40 benchmarks a change: 1500 changes of equal sides, 400 slower ones of 2% and of 5%."""
    changes, slower, rule = 1500, 400, Rule(tests=BENCHMARKS)
    random = np.random.default_rng(17)
    pool = statistics(model(POOL, random))
    alarms, missed = np.zeros(changes, dtype=bool), {0.02: 0, 0.05: 0}
    for _ in range(BENCHMARKS):
        history = Spread.of(random.choice(pool, HISTORY))
        equal = random.choice(pool, (changes, LAST))
        slower_ones, _ = decided(equal, rule, history)
        again = random.choice(pool, (changes, CONFIRM_BLOCKS))
        alarms |= slower_ones & confirmed(again, rule, history)
        for slowdown in missed:
            _, green = decided(equal[:slower] + np.log1p(slowdown), rule, history)
            missed[slowdown] += int(green.sum())
    assert not alarms.any()  # so at most 0.2% of changes, by Clopper and Pearson's 95% bound
    assert missed[0.02] <= 0.005 * slower * BENCHMARKS
    assert missed[0.05] == 0


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_noise_alone_never_looks_like_a_large_slowdown(model: Model) -> None:
    """Without any history; four blocks of 200,000."""
    blocks = np.random.default_rng(3).choice(
        statistics(model(POOL, np.random.default_rng(2))), (50_000, LOOKS[0])
    )
    assert (blocks.min(axis=1) < np.log1p(FAR * Rule(tests=1).tolerance)).all()


@pytest.mark.parametrize("colder", [0.0, 0.02, 0.08, 0.3])
def test_cold_caches_after_the_other_side_add_nothing_to_the_spread(colder: float) -> None:
    """Of two turns the first follows its own side. Over single pairs 8% triples the spread."""
    logs = quiet(2000, np.random.default_rng(6))
    summary = statistics(logs + colder * (places() % 2))
    assert np.std(summary) < 1.1 * np.std(statistics(logs))
    assert abs(np.mean(summary)) < 3 * np.std(summary) / 2000**0.5


# A rule whose errors are frequent enough to count, and that next to never stops at green.
FREQUENT = Rule(tests=1, margin=1e-9, tolerance=2e-9, alpha=0.05, miss=1e-9)


def test_all_looks_together_spend_alpha_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequential_test, "FAR", 1e9)  # of so small a tolerance all is far
    blocks = np.random.default_rng(5).normal(0, 0.01, (20_000, LAST))
    slower, _ = decided(blocks - 20 * FREQUENT.tolerance, FREQUENT, Spread(0.01, 400))
    assert 0.02 < slower.mean() <= 0.055


def test_a_slowdown_is_confirmed_as_often_as_students_interval_says() -> None:
    blocks = np.random.default_rng(12).normal(0, 0.01, (20_000, CONFIRM_BLOCKS))
    for history in (Spread(), Spread(0.01, 400)):
        assert confirmed(blocks, Rule(tests=1), history).mean() == pytest.approx(0.05, abs=0.006)
        assert confirmed(blocks + 0.1, Rule(tests=1), history).mean() > 0.99


def test_a_history_that_is_not_todays_does_not_decide() -> None:
    """Of blocks 30 times wider than the history's."""
    rule, history = Rule(tests=BENCHMARKS), Spread(0.001, 40)
    blocks = np.random.default_rng(7).normal(0, 0.03, (2_000, LOOKS[0]))
    calls = [decide(row, rule, history) for row in blocks]
    assert calls.count(Call.SLOWER) < 0.001 * len(calls)
    calls = [decide(row + np.log1p(0.02), rule, history) for row in blocks]
    assert sum(call in (Call.SAME, Call.FASTER) for call in calls) < 0.0025 * len(calls)


# -- single calls ------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("history", [Spread(), Spread(0.005, 40)], ids=["no history", "history"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("level", [-0.2, 0.0, 0.2])
def test_a_statistic_that_is_no_number_decides_nothing(
    bad: float, level: float, history: Spread
) -> None:
    rule = Rule(tests=BENCHMARKS)
    for look in LOOKS:
        for blocks in (np.array([bad] + [level] * (look - 1)), np.full(look, bad)):
            assert decide(blocks, rule, history) is Call.MORE
    assert not confirmed([bad, *[level] * (CONFIRM_BLOCKS - 1)], rule, history)


@pytest.mark.parametrize("certified", [True, False])
def test_a_confirmation_uses_the_known_spread_of_the_device(
    certified: bool,
) -> None:
    """Blocks that scattered by 2% when they decided, and 0.2% more in fresh ones: sure on a device
    that scatters by 0.1%, and nothing on one of which no more is known."""
    history = Spread(0.001, 40) if certified else Spread()
    series = Series(Rule(tests=1), history, statistics=[0.03, 0.05, 0.07, 0.05])
    series.again = [0.002 + 0.001 * (-1) ** place for place in range(CONFIRM_BLOCKS)]
    slower = Figure("device_seconds", Outcome.SLOWER, "slower")
    outcome = Outcome.SLOWER if certified else Outcome.INCONCLUSIVE
    assert series.confirm(slower).outcome is outcome
