"""The gate's rule: how often it is wrong under five kinds of noise.

A block's statistic is the median of the log ratios of pairs measured A B B A; all seeds are fixed.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tinyllama.harness.gate import decision
from tinyllama.harness.gate.certify import critical
from tinyllama.harness.gate.decision import (
    CONFIRM_BLOCKS,
    LOOKS,
    Call,
    Floats,
    Rule,
    Spread,
    bounds,
    confirmed,
    decide,
    of_block,
    smallest_found,
)
from tinyllama.harness.gate.figures import Series
from tinyllama.harness.records.verdict import Figure, Outcome

BENCHMARKS, PAIRS, HISTORY, POOL = 40, 40, 40, 20_000
LAST = LOOKS[-1]
GREEN = (Call.SAME.value, Call.FASTER.value)
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
def test_no_false_alarm_and_no_slowdown_missed(model: Model) -> None:
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


@pytest.mark.parametrize("colder", [0.0, 0.02, 0.08, 0.3])
def test_what_caches_cost_after_the_other_side_adds_nothing_to_the_spread(colder: float) -> None:
    """Of two turns the first follows its own side. Over single pairs 8% triples the spread."""
    logs = quiet(2000, np.random.default_rng(6))
    found = statistics(logs + colder * (places() % 2))
    assert np.std(found) < 1.1 * np.std(statistics(logs))
    assert abs(np.mean(found)) < 3 * np.std(found) / 2000**0.5


# A rule whose errors are frequent enough to count, and that next to never stops at green.
FREQUENT: dict[str, Any] = {
    "tests": 1,
    "margin": 1e-9,
    "tolerance": 2e-9,
    "alpha": 0.05,
    "miss": 1e-9,
}


def share_slower(rule: Rule, history: Spread) -> float:
    blocks = np.random.default_rng(5).normal(0, 0.01, (20_000, LAST))
    return float(decided(blocks, rule, history)[0].mean())


@pytest.mark.parametrize("history", [Spread(), Spread(0.01, 40)], ids=["no history", "history"])
def test_false_alarms_are_within_alpha(history: Spread) -> None:
    assert 0.02 < share_slower(Rule(**FREQUENT), history) <= 0.05


@pytest.mark.long
def test_slowdowns_of_the_tolerance_are_called_same_no_more_than_allowed() -> None:
    rule = Rule(tests=BENCHMARKS, miss=0.05)
    blocks = np.random.default_rng(6).normal(np.log1p(rule.tolerance), 0.01, (20_000, LAST))
    assert 0.025 < decided(blocks, rule, Spread(0.01, 40))[1].mean() <= 0.05


def test_a_slowdown_is_confirmed_as_often_as_students_interval_says() -> None:
    blocks = np.random.default_rng(12).normal(0, 0.01, (20_000, CONFIRM_BLOCKS))
    for history in (Spread(), Spread(0.01, 400)):
        assert confirmed(blocks, Rule(tests=1), history).mean() == pytest.approx(0.05, abs=0.006)
        assert confirmed(blocks + 0.1, Rule(tests=1), history).mean() > 0.99


# -- the history -------------------------------------------------------------------------------


def wrong_at_once(slowdown: float, wrong: Any) -> float:
    """The share of wrong calls at the first look, of blocks 30 times wider than the history's."""
    blocks = np.random.default_rng(7).normal(np.log1p(slowdown), 0.03, (20_000, LOOKS[0]))
    calls = decision._calls(blocks, 0, Rule(tests=BENCHMARKS), Spread(0.001, 40))
    return float(np.isin(calls, wrong).mean())


def test_a_history_that_is_not_todays_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = [-0.03, 0.03, 0.05, 0.01]
    assert decide(wide, Rule(tests=BENCHMARKS), Spread(0.001, 40)) is Call.MORE
    assert wrong_at_once(0.0, Call.SLOWER.value) < 0.001
    assert wrong_at_once(0.02, GREEN) < 0.0025
    monkeypatch.setattr(decision, "UNLIKE_HISTORY", 0.0)  # whatever it says
    assert wrong_at_once(0.02, GREEN) > 0.1


def test_a_spread_of_no_blocks_knows_nothing() -> None:
    assert Spread.of([]) == Spread(0.0, 0)
    spread = Spread.of([0.003, -0.004])  # about zero, which is known, not about their mean
    assert spread.freedom == 2
    assert spread.deviation == pytest.approx(0.0125**0.5 / 100 * 10**0.5, rel=1e-9)


# -- the smallest slowdown ---------------------------------------------------------------------


def test_the_smallest_slowdown_is_found_99_times_of_100_at_the_last_look() -> None:
    rule, history = Rule(tests=BENCHMARKS), Spread(0.01, 50)
    slowdown = np.log1p(smallest_found(rule, history))
    blocks = np.random.default_rng(9).normal(slowdown, history.deviation, (20_000, LAST))
    low = bounds(blocks, len(LOOKS) - 1, rule, history).slower_low
    assert (low > np.log1p(rule.margin)).mean() == pytest.approx(0.99, abs=0.004)


# -- single calls ------------------------------------------------------------------------------

NEAR = np.linspace(-1e-3, 1e-3, LAST)


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize(
    ("ratio", "call"),
    [(0.9, Call.FASTER), (0.999, Call.SAME), (1.0, Call.SAME), (1.5, Call.SLOWER)],
)
def test_what_is_plain_is_called_at_any_look(look: int, ratio: float, call: Call) -> None:
    blocks = np.log(ratio) + np.resize(NEAR[::7], look)
    assert decide(blocks, Rule(tests=BENCHMARKS), Spread(0.002, 40)) is call


def test_between_margin_and_tolerance_nothing_is_certain() -> None:
    blocks = 0.0125 + 4 * NEAR
    assert decide(blocks, Rule(tests=BENCHMARKS, tolerance=0.013), Spread(0.02, 40)) is Call.MORE


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("history", [Spread(), Spread(0.005, 40)], ids=["no history", "history"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("level", [-0.2, 0.0, 0.2])
def test_a_statistic_that_is_no_number_decides_nothing(
    bad: float, level: float, history: Spread
) -> None:
    rule = Rule(tests=BENCHMARKS)
    for look in LOOKS:
        for blocks in (np.array([bad] + [level] * (look - 1)), np.full(look, bad)):
            assert decide(blocks, rule, history) is Call.MORE
    assert not confirmed([bad, *[level] * (CONFIRM_BLOCKS - 1)], rule, history)


@pytest.mark.parametrize("blocks", [0, 1, 3, 5, 19, 21])
def test_only_looks_decide(blocks: int) -> None:
    with pytest.raises(ValueError, match="look after one of"):
        decide(np.zeros(blocks), Rule(tests=1))
    with pytest.raises(ValueError, match=f"give {CONFIRM_BLOCKS}"):
        confirmed(np.zeros(blocks), Rule(tests=1), Spread())


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "bad",
    [
        *({"tests": tests} for tests in (0, -1, 1.5, NAN, INF)),
        *({"margin": margin} for margin in (0.0, -0.01, 0.02, 0.03, NAN)),
        *({"tolerance": tolerance} for tolerance in (0.0, 0.005, NAN, INF)),
        *({name: share} for name in ("alpha", "miss") for share in (0.0, -0.1, 0.5, 5.0, NAN)),
    ],
    ids=str,
)
def test_a_rule_that_would_decide_anything_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Rule(**{"tests": 1, **bad})


@pytest.mark.parametrize("bad", [(NAN, 20), (INF, 20), (-0.01, 20), (0.01, -1)])
def test_a_spread_that_is_none_is_refused(bad: tuple[float, int]) -> None:
    with pytest.raises(ValueError, match="a spread of"):
        Spread(*bad)
    with pytest.raises(ValueError, match="a spread of"):
        Spread.of([0.01, NAN])


@pytest.mark.parametrize("certified", [True, False])
def test_a_confirmation_is_by_the_device_where_it_is_known_as_certificates_simulate(
    certified: bool,
) -> None:
    """Blocks that scattered by 2% when they decided, and 0.2% more in fresh ones: sure on a device
    that scatters by 0.1%, and nothing on one of which no more is known."""
    history = Spread(0.001, 40) if certified else Spread()
    series = Series(Rule(tests=1), history, statistics=[0.03, 0.05, 0.07, 0.05])
    series.again = [0.002 + 0.001 * (-1) ** place for place in range(CONFIRM_BLOCKS)]
    slower = Figure("device_seconds", Outcome.SLOWER, "slower")
    assert confirmed(series.again, series.rule, history)
    outcome = Outcome.SLOWER if certified else Outcome.INCONCLUSIVE
    assert series.confirm(slower).outcome is outcome
