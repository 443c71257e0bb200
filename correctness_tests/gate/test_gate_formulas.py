"""Each number of the gate's rule by a formula of its own, and each limit from both sides."""

from __future__ import annotations

import math
from statistics import mean, stdev, variance
from typing import Any

import numpy as np
import pytest
from scipy import stats

from tinyllama.harness.gate import decision, figures, turns
from tinyllama.harness.gate.decision import (
    CONFIRM_ALPHA,
    CONFIRM_BLOCKS,
    LEAST_SPREAD,
    LOOKS,
    UNLIKE_HISTORY,
    Bounds,
    Call,
    Rule,
    Spread,
    bounds,
    confirmation_low,
    confirmed,
    decide,
    of_block,
    smallest_found,
)
from tinyllama.harness.gate.figures import Series
from tinyllama.harness.records.verdict import Figure, Outcome

RULE = Rule(tests=40, margin=0.006, tolerance=0.03, alpha=2e-3, miss=1e-3)
Moments = tuple[float, float, int]  # a mean, its standard error, degrees of freedom


def moments(blocks: list[float], history: Spread) -> Moments:
    """By the definitions: of the blocks alone, or pooled with a history that they are like."""
    own, degrees, number = variance(blocks), len(blocks) - 1, len(blocks)
    found, freedom = own, degrees
    if history.freedom:
        known = max(history.deviation, LEAST_SPREAD) ** 2
        if own / known <= stats.f.isf(UNLIKE_HISTORY, degrees, history.freedom):
            freedom = degrees + history.freedom
            found = (degrees * own + history.freedom * known) / freedom
    return mean(blocks), max(math.sqrt(found), LEAST_SPREAD) / math.sqrt(number), freedom


def test_the_looks_spend_what_obrien_and_fleming_leave_them() -> None:
    """Of the error of a merge's figures; and a rule's settings are its own."""
    spent = 0.0
    for look, blocks in enumerate(LOOKS):
        wide = stats.norm.isf(RULE.alpha / RULE.tests / 2) / math.sqrt(blocks / LOOKS[-1])
        total = 2 * stats.norm.sf(wide)
        assert RULE.slower_level(look) == pytest.approx(total - spent, rel=1e-9)
        spent = total
    assert RULE.same_level() == pytest.approx(RULE.miss / 5)


def student(moments: Moments, level: float) -> float:
    return float(stats.t.isf(level, moments[2])) * moments[1]


def drawn(number: int, deviation: float, seed: int = 0) -> list[float]:
    random = np.random.default_rng(seed)
    return [float(one) for one in random.normal(0.01, deviation, number)]


HISTORIES = {
    "none": Spread(),
    "alike": Spread(0.011, 6),
    "narrow": Spread(0.001, 40),  # which the blocks are not like
    "exact": Spread(0.0, 3),
}


@pytest.mark.parametrize("deviation", [0.01, 1e-5], ids=["scattered", "steady"])
@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
@pytest.mark.parametrize("look", range(len(LOOKS)))
def test_bounds_are_students_of_blocks_and_history(
    look: int, history: Spread, deviation: float
) -> None:
    blocks = drawn(LOOKS[look], deviation, look)
    expected = moments(blocks, history)
    slower = student(expected, RULE.slower_level(look))
    green = student(expected, RULE.same_level())
    middle = expected[0]
    found = bounds(np.array([blocks, blocks[::-1]]), look, RULE, history)
    for row in range(2):
        ours = (found.mean, found.slower_low, found.green_low, found.green_high)
        theirs = (middle, middle - slower, middle - green, middle + green)
        assert [one[row] for one in ours] == pytest.approx(theirs, rel=1e-9)


@pytest.mark.parametrize("look", range(len(LOOKS)))
def test_blocks_are_like_a_history_up_to_a_limit(look: int) -> None:
    number = LOOKS[look]
    blocks = drawn(number, 0.01)
    limit = stats.f.isf(UNLIKE_HISTORY, number - 1, 9)
    errors = []
    for by in (0.99, 1.01):
        history = Spread(math.sqrt(by * variance(blocks) / limit), 9)
        expected = moments(blocks, history)
        found = bounds(np.array(blocks), look, RULE, history)
        green = student(expected, RULE.same_level())
        assert float(found.green_high) == pytest.approx(expected[0] + green, rel=1e-9)
        errors.append(expected[2])
    assert errors == [number - 1, number - 1 + 9]


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
def test_the_bound_that_confirms_is_students_of_blocks_and_history(history: Spread) -> None:
    blocks = drawn(CONFIRM_BLOCKS, 0.01)
    expected = moments(blocks, history)
    low = expected[0] - student(expected, CONFIRM_ALPHA)
    assert float(confirmation_low(blocks, history)) == pytest.approx(low, rel=1e-9)


@pytest.mark.parametrize("spread", [Spread(0.01, 50), Spread(0.0, 4), Spread()], ids=str)
def test_the_smallest_slowdown_is_margin_and_errors_added(spread: Spread) -> None:
    error = max(spread.deviation, LEAST_SPREAD) / math.sqrt(LOOKS[-1])
    wide = stats.t.isf(RULE.slower_level(len(LOOKS) - 1), spread.freedom + LOOKS[-1] - 1)
    for power in (0.99, 0.5):
        log = math.log(1 + RULE.margin) + (wide + stats.norm.ppf(power)) * error
        found = smallest_found(RULE, spread, power)
        assert found == pytest.approx(math.exp(log) - 1, rel=1e-9)
    assert smallest_found(RULE, spread) == smallest_found(RULE, spread, 0.99)


def test_a_blocks_statistic_is_the_median_of_pairs_both_ways() -> None:
    logs = [0.1, 0.3, 0.2, 0.6, 1.0, 5.0]
    assert float(of_block(logs)) == pytest.approx(0.4)
    many = np.array([[logs, [-one for one in logs]], [logs[::-1], [0.0] * 6]])
    assert of_block(many) == pytest.approx(np.array([[0.4, -0.4], [0.4, 0.0]]))


MARGIN, TOLERANCE = np.log1p(RULE.margin), np.log1p(RULE.tolerance)


@pytest.mark.parametrize(
    ("slower_low", "green_high", "at", "beyond"),
    [
        (-1.0, TOLERANCE, Call.MORE, Call.SAME),
        (-1.0, -MARGIN, Call.SAME, Call.FASTER),
        (MARGIN, 1.0, Call.MORE, Call.SLOWER),
        (MARGIN, 0.0, Call.SAME, Call.SLOWER),  # SLOWER comes first
    ],
)
def test_a_bound_at_its_limit_is_not_beyond_it(
    monkeypatch: pytest.MonkeyPatch, slower_low: float, green_high: float, at: Call, beyond: Call
) -> None:
    for by, expected in ((0.0, at), (1e-9, beyond)):
        low = slower_low + by
        high = green_high - by
        given = Bounds(*(np.array([one]) for one in (0.0, low, -9.0, high)))
        monkeypatch.setattr(decision, "bounds", lambda *_, given=given: given)
        assert decide([0.0] * LOOKS[0], RULE) is expected


def test_a_confirmation_at_zero_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for low, expected in ((0.0, False), (1e-12, True)):
        monkeypatch.setattr(decision, "confirmation_low", lambda *_, low=low: low)
        assert confirmed([0.0] * CONFIRM_BLOCKS, RULE, Spread()) is expected


# -- figures of a series --------------------------------------------------------------------------


def test_a_figure_shows_the_bounds_that_decide() -> None:
    blocks = [0.01, 0.02, 0.04, 0.05]
    series = Series(RULE, Spread(), statistics=blocks)
    found = bounds(np.array(blocks), 0, RULE, Spread())

    def percent(log: Any) -> str:
        return f"{math.exp(log) - 1:+.2%}"

    for call in Call:
        figure = series.figure("device_seconds", call)
        low = found.slower_low if call is Call.SLOWER else found.green_low
        interval = f"[{percent(low)}, {percent(found.green_high)}]"
        text = f"device_seconds {percent(found.mean)} {interval} in 4 blocks"
        if call is Call.MORE:
            text += ", neither certainly under 3.0% nor over 0.6%"
        assert figure.text == text
        assert figure.metric == "device_seconds"
        assert figure.ratio == pytest.approx(math.exp(0.03))
        expected = Outcome.INCONCLUSIVE if call is Call.MORE else Outcome[call.name]
        assert figure.outcome is expected
    series.accepted = 0.03
    assert series.figure("device_seconds", Call.SAME).text.endswith("in 4 blocks, 3.0% accepted")


def test_slow_turns_are_told_where_they_are_beyond_what_is_accepted() -> None:
    excesses = [0.2, 0.202, 0.201, 0.199]
    lowest = turns.lowest(excesses, 1)
    assert math.log1p(turns.MARGIN) < lowest < math.log1p(turns.MARGIN + 0.2)
    series = Series(Rule(tests=1), Spread(), excesses=excesses)
    figure = series.slow_turns("device_seconds")
    assert figure is not None
    assert figure.text == (
        f"device_seconds: a share of its turns is slower: the mean call by "
        f"{math.exp(0.2005) - 1:+.2%} [at least {math.exp(lowest) - 1:+.2%}] beside the median, "
        "in 4 blocks"
    )
    assert (figure.metric, figure.outcome) == ("slow turns of device_seconds", Outcome.SLOWER)
    assert figure.ratio == pytest.approx(math.exp(0.2005))
    series.accepted = 0.2
    assert series.slow_turns("device_seconds") is None


def test_without_a_history_a_confirmation_is_by_the_blocks_that_decided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocks, given = [0.03, 0.05, 0.07, 0.06], []
    monkeypatch.setattr(figures, "confirmed", lambda again, rule, known: given.append(known))
    series = Series(RULE, Spread(), statistics=blocks, again=[0.01, 0.03])
    slower = Figure("device_seconds", Outcome.SLOWER, "slower")
    assert series.confirm(slower).text == "slower, not confirmed: +2.02% in 2 fresh blocks"
    (known,) = given
    assert known.deviation == pytest.approx(stdev(blocks))
    assert known.freedom == 3
    monkeypatch.setattr(figures, "confirmed", lambda *_: True)
    text = series.confirm(slower).text
    assert text == "slower, confirmed by +2.02% in fresh processes"
    series.again = []
    assert series.confirm(slower).text == "slower, not confirmed: no in 0 fresh blocks"


# -- slow turns -----------------------------------------------------------------------------------

M = turns.MEAN + "s"


def test_an_excess_and_its_lower_bound_are_as_defined() -> None:
    side = [{"s": 1.0, M: 1.5}, {"s": 3.0, M: 9.0}, {"s": 4.0}]  # 9 counts as twice the median
    assert turns.excess(side, "s") == pytest.approx(math.log((1.5 + 6.0 + 4.0) / 3 / 3.0))
    assert turns.mean_call([3.0, 4.0, 5.0, 9.0]) == pytest.approx((3 + 4 + 5 + 6) / 4)
    assert turns.mean_call([3.0, 9.0]) == pytest.approx((3 + 6) / 2)
    excesses = [0.03, 0.05, 0.04, 0.06]
    level = turns.ALPHA / 7 / len(LOOKS)
    error = stdev(excesses) / 2
    low = mean(excesses) - stats.t.isf(level, 3) * error
    assert turns.lowest(excesses, 7) == pytest.approx(low, rel=1e-9)
    steady = [0.05, 0.05, 0.05, 0.05]
    low = 0.05 - stats.t.isf(level, 3) * turns.LEAST_SPREAD / 2
    assert turns.lowest(steady, 7) == pytest.approx(low, rel=1e-9)


def test_a_blocks_numbers_are_of_the_candidate_over_the_base() -> None:
    base = [{"s": 1.0, "t": 3.0, M: 1.1}, {"s": 2.0, "t": 3.0}] * 2
    candidate = [{"s": 1.1, "t": 3.0}, {"s": 2.6, "t": 3.0}] * 2
    found = turns.block(base, candidate, ["s", "t"])
    logs = [math.log(1.1), math.log(1.3)]
    assert found.statistics == pytest.approx({"s": mean(logs), "t": 0.0})
    more = turns.excess(candidate, "s") - turns.excess(base, "s")
    assert found.excesses == pytest.approx({"s": more, "t": 0.0})


def test_limits_of_slow_turns_from_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    for by, slower in ((0.0, False), (1e-9, True)):
        low = math.log1p(turns.MARGIN + 0.02) + by
        monkeypatch.setattr(turns, "lowest", lambda *_, low=low: low)
        assert turns.slower([0.0] * 4, 1, 0.02) is slower
    assert pytest.approx(0.04) == turns.SUSPECT
    assert turns.suspect([0.041] * 4)
    assert not turns.suspect([0.04] * 4)
    assert not turns.suspect([0.0, 0.1] * 2), "0.05, and its standard error is 0.029"
    assert turns.suspect([0.01, 0.09] * 2), "0.05, and its standard error is 0.023"


@pytest.mark.parametrize(
    ("turn", "pace", "message"),
    [
        ({"s": 1.0, "t": 2.0}, 8.0, ""),
        ({"s": 1.0, "t": 2.0}, 8.1, "of the side says 2 s for a call, which took 8.1 s by the"),
        ({"s": 1.0, "t": 2.0, turns.CALL: 3.0, M: 9.0}, 12.0, ""),
        ({"s": 1.0, "t": 2.0, turns.CALL: 3.0, M: 9.0}, 12.1, "says 3 s for a call"),
        ({"s": 0.1, "t": 0.2}, 0.9, "says 0.2 s for a call, which took 0.9 s"),
        ({"s": 1.0}, 0.0, "a turn of the side gave s, not s, t"),
        ({}, 0.0, "a turn of the side gave nothing, not s, t"),
        ({"s": 1.0, "t": 1.0, "u": 1.0}, 0.0, "gave s, t, u, not s, t"),
        ({"s": 1.0, "t": 0.0}, 0.0, "t: 0.0 s in a turn of the side is no time"),
        ({"s": 1.0, "t": math.nan}, 0.0, "t: nan s in a turn of the side is no time"),
        ({"s": 1.0, "t": 2.0, M: -1.0}, 0.0, "mean s: -1.0 s in a turn of the side is no time"),
        ({"s": 1.0, "t": 2.0, turns.CALL: 0.0}, 0.0, "a call: 0.0 s in a turn of the side is no"),
    ],
)
def test_a_turn_has_its_times_and_no_others(
    turn: dict[str, float], pace: float, message: str
) -> None:
    if not message:
        turns.check_times(turn, "side", ("s", "t"), pace)
        return
    with pytest.raises(ValueError, match=message):
        turns.check_times(turn, "side", ("s", "t"), pace)


def test_which_calls_of_a_block_are_held() -> None:
    base = [[1, 2, 3], [4, 5]]
    kinds = [(0, False), (1, False), (1, True)]
    for alike, other in ((False, base), (True, base)):
        found = turns.held(base, other, alike)
        assert [(one[0], one[3]) for one in found] == [*kinds, *([] if alike else [(1, False)])]
        assert all(0 <= place <= 1 and 0 <= call < 2**20 for _, place, call, _ in found)
    places = {one[1] for _ in range(40) for one in turns.held(base, base, True)}
    assert places == {0, 1}, "the first turn and the last"
    differ = [[1, 9, 3], [4, 8, 7]]  # of a call that only one side made nothing is known
    found = turns.held(base, differ, True)[3:]
    assert sorted(found) == [(side, place, 1, True) for side in (0, 1) for place in (0, 1)]
    many = turns.held([list(range(9))], [list(range(1, 10))], True)[3:]
    assert len(many) == 2 * turns.MOST_HELD
    assert [one[0] for one in many] == [0, 1] * turns.MOST_HELD
    assert len(turns.held([[], []], [[], []], True)) == 3, "bits may differ"
