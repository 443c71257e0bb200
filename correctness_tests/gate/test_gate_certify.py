"""The error rates that are estimated from A/A blocks, and the bars that they must hold."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from correctness_tests.support.gate_samples import CARD, DEVICE, HOST, VERSIONS, block
from tinyllama.harness.gate import decision
from tinyllama.harness.gate.certify import (
    Bar,
    Certificate,
    Rules,
    bars,
    certify,
    common_share,
    critical,
)
from tinyllama.harness.gate.decision import LOOKS, Call, Floats, Rule, Spread, decide
from tinyllama.harness.gate.noise import Noise

RULES: Rules = {DEVICE: (0.005, 0.02)}
MERGES = 5000
SMALL = np.linspace(-0.004, 0.004, 30).tolist()


def noise_of(table: Floats, metric: str = DEVICE) -> Noise:
    """Blocks of (blocks, benchmarks): b0, b1 and so on."""
    rows = [{f"b{i}": {metric: float(value)} for i, value in enumerate(row)} for row in table]
    return Noise(CARD, [block(n, statistics=row) for n, row in enumerate(rows)])


def normal(spread: float, blocks: int = 400, seed: int = 0) -> Floats:
    """A column of just the normal distribution's quantiles, in some order."""
    values = spread * stats.norm.ppf((np.arange(blocks) + 0.5) / blocks)
    return np.random.default_rng(seed).permutation(values)[:, None]


def columns(number: int, spread: float) -> Floats:
    """Of benchmarks whose blocks have nothing to do with each other."""
    return np.hstack([normal(spread, seed=seed) for seed in range(number)])


def certified(table: Floats, **options: Any) -> Certificate:
    return certify(noise_of(table), VERSIONS, **{"rules": RULES, "merges": MERGES, **options})


# -- one figure --------------------------------------------------------------------------------


def share_found(slowdown: float, spread: float, rule: Rule, freedom: int) -> float:
    """Of normal blocks that no look calls green, by the joint distribution of the looks' means."""
    counts = np.array(LOOKS)
    levels = [rule.slower_level(look) for look in range(len(LOOKS))]
    quantiles = stats.t.isf(levels, freedom + counts - 1)
    limits = np.log1p(rule.margin) + quantiles * spread / np.sqrt(counts)
    moved = np.log1p(slowdown)
    covariance = spread**2 / np.maximum.outer(counts, counts)
    missed = stats.multivariate_normal.cdf(limits, np.full(len(LOOKS), moved), covariance)
    error = spread / np.sqrt(decision.CONFIRM_BLOCKS)
    enough = stats.t.isf(decision.CONFIRM_ALPHA, freedom + decision.CONFIRM_BLOCKS - 1) * error
    return float((1 - missed) * stats.norm.cdf((moved - enough) / error))


@pytest.mark.parametrize("spread", [0.006, 0.01, 0.02, 0.04])
def test_of_normal_blocks_as_many_slowdowns_are_found_as_theory_says(spread: float) -> None:
    values = normal(spread)
    (found,) = certified(values, rules={DEVICE: (0.005, 0.005001)}).found
    assert found.spread == Spread.of(values).deviation
    rule = Rule(1, 0.005, 0.005001)
    for slowdown, share in found.detected.items():
        theory = share_found(slowdown, found.spread, rule, len(values))
        sampling = 4 * np.sqrt(theory * (1 - theory) / MERGES)
        assert share == pytest.approx(theory, abs=max(0.012, sampling)), slowdown
    assert any(0.05 < share < 0.95 for share in found.detected.values())


def test_the_smallest_slowdown_is_the_first_of_which_99_of_100_are_found() -> None:
    (found,) = certified(normal(0.02), rules={DEVICE: (0.005, 0.005001)}).found
    rule = Rule(1, 0.005, 0.005001)
    assert found.smallest is not None
    assert share_found(found.smallest, found.spread, rule, 400) > 0.985
    assert share_found(found.smallest - 0.005, found.spread, rule, 400) < 0.99
    (found,) = certified(normal(0.6)).found
    assert found.smallest is None


@pytest.mark.parametrize("history", [Spread(), Spread(0.004, 9)], ids=["no history", "history"])
def test_a_slowdown_that_is_critical_decides_as_the_gate_does(history: Spread) -> None:
    """What is SLOWER, or green, before and after each critical slowdown."""
    random = np.random.default_rng(3)
    statistics = random.normal(0, 0.004, (6, LOOKS[-1]))
    rule = Rule(2, 0.006, 0.03)

    def decided(merge: int, slowdown: float) -> Call:
        for blocks in LOOKS:
            call = decide(statistics[merge, :blocks] + slowdown, rule, history)
            if call is not Call.MORE:
                return call
        return Call.MORE

    slower_above, green_below = critical(statistics, rule, history)
    for merge, (slower, green) in enumerate(zip(slower_above, green_below, strict=True)):
        assert decided(merge, slower + 1e-9) is Call.SLOWER
        assert decided(merge, slower - 1e-9) is not Call.SLOWER
        for slowdown in np.linspace(green - 0.01, slower - 1e-9, 5):
            found = decided(merge, slowdown)
            assert (found in (Call.SAME, Call.FASTER)) == (slowdown < green)


# -- merges ------------------------------------------------------------------------------------


@pytest.mark.long
def test_what_a_launch_has_in_common_stays_in_common() -> None:
    """Ten benchmarks that all show the same are green together as often as one is."""
    one = certified(normal(0.02)).all_green
    same = certified(np.repeat(normal(0.02), 10, axis=1)).all_green
    apart = certified(columns(10, 0.02)).all_green
    assert 0.7 < one < 0.95
    assert same == pytest.approx(one, abs=0.03)
    assert apart == pytest.approx(one**10, abs=0.05)
    assert apart < one - 0.3


@pytest.mark.long
def test_what_states_metrics_is_decided_on_those_alone() -> None:
    rows = [{"b0": {DEVICE: x}, "b1": {HOST: 5 * x}, "b2": {DEVICE: x, HOST: x}} for x in SMALL]
    noise = Noise(CARD, [block(n, statistics=row) for n, row in enumerate(rows)])
    rules: Rules = {DEVICE: (0.005, 0.02), HOST: (0.02, 0.10)}
    claims = {"b0": {DEVICE: 0.02}, "b1": {HOST: 0.1}}
    drawn = certify(noise, VERSIONS, rules, claims, merges=MERGES)
    figures = [(found.benchmark, found.metric) for found in drawn.found]
    assert figures == [("b0", DEVICE), ("b1", HOST), ("b2", DEVICE), ("b2", HOST)]
    assert drawn.left_out == 0
    claims = {"b0": {HOST: 0.1}}
    with pytest.raises(ValueError, match=f"{HOST} of b0 is missing from 30"):
        certify(noise, VERSIONS, rules, claims, merges=MERGES)


@pytest.mark.long
def test_a_seed_is_a_certificate_and_all_of_it_is_json() -> None:
    table = normal(0.6)
    drawn = certified(table, seed=1)
    assert drawn == certified(table, seed=1)
    assert drawn != replace(certified(table, seed=3), seed=1)
    data = json.loads(json.dumps(drawn.as_dict(), allow_nan=False))
    assert data == drawn.as_dict()
    assert data["blocks"] == 400
    assert data["found"][0]["smallest"] is None
    detected = {float(by): share for by, share in data["found"][0]["detected"].items()}
    assert detected == drawn.found[0].detected
    assert list(detected) == [0.01, 0.02, 0.05, 0.1]


@pytest.mark.long
def test_a_figure_is_decided_by_the_tolerance_it_states_and_all_share_alpha() -> None:
    table = columns(2, 0.02)
    stated = certified(table, claims={"b1": {DEVICE: 0.05}})
    assert [found.tolerance for found in stated.found] == [0.02, 0.05]
    assert stated.all_green > certified(table).all_green + 0.05
    alone = certified(table, benchmarks=["b0"]).found[0]
    assert alone.by_formula < stated.found[0].by_formula


# -- what is not certified ---------------------------------------------------------------------


def test_a_certificate_needs_20_blocks_that_hold_every_figure() -> None:
    table = columns(2, 0.005)[:20]
    noise = noise_of(table)
    assert certify(noise, VERSIONS, RULES, merges=100).blocks == 20
    with pytest.raises(ValueError, match="0 of 0 A/A blocks of A Card 1 with these versions"):
        certify(noise, {"torch": "2.12"}, RULES)
    last = noise.blocks.pop()
    with pytest.raises(ValueError, match=r"19 of 19 A/A blocks .* 20 or more: record more$"):
        certify(noise, VERSIONS, RULES)
    noise.add(replace(last, statistics={"b0": {DEVICE: 0.0}}))
    with pytest.raises(ValueError, match=f"19 of 20 .*{DEVICE} of b1 is missing from 1"):
        certify(noise, VERSIONS, RULES)
    assert certify(noise, VERSIONS, RULES, benchmarks=["b0"], merges=100).blocks == 20
    noise.add(last)
    partly = certify(noise, VERSIONS, RULES, merges=100)
    assert (partly.blocks, partly.left_out) == (20, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"benchmarks": ["b0", "new"]}, f"{DEVICE} of new is missing from 30"),
        ({"claims": {"new": {DEVICE: 0.02}}}, f"{DEVICE} of new is missing from 30"),
        ({"rules": {**RULES, HOST: (0.02, 0.1)}}, f"{HOST} of b0 is missing from 30"),
        ({"claims": {"b0": {HOST: 0.1}}}, rf"rules of \['{DEVICE}'\]: of .* give {HOST}$"),
        ({"rules": {}}, r"rules of \[\]: of .* give one or more$"),
        ({"rules": {"seconds": (0.005, 0.02)}}, r"rules of \['seconds'\]: of .*_seconds give"),
        ({"benchmarks": []}, "5000 merges of 0 figures: give one or more of both"),
        ({"merges": 0}, "0 merges of 1 figures: give one or more of both"),
    ],
)
def test_what_was_never_timed_is_not_certified(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        certified(normal(0.005, 30), **options)


# -- the bars ----------------------------------------------------------------------------------

ALARMS = "false alarms in under 0.1% of merges of equal sides"
ALL_GREEN = "95% of merges of equal sides all green"
LEAN = "blocks of equal sides lean to neither by a fifth of the margin"
TWO = "99% of slowdowns of 2% found by those that state 2%"
FIVE = "every slowdown of 5% found by those that state 2%"
WITHIN = "99% of slowdowns of the tolerance found"


def missed(table: Floats, tolerance: float = 0.02, **options: Any) -> dict[str, Bar]:
    claims = {f"b{i}": {DEVICE: tolerance} for i in range(table.shape[1])}
    found = bars(certified(table, claims=claims, **options))
    return {bar.text: bar for bar in found if not bar.held}


def test_a_quiet_device_holds_every_bar() -> None:
    claims = {"b0": {DEVICE: 0.02}, "b1": {DEVICE: 0.02}}
    found = bars(certified(columns(2, 0.004), claims=claims))
    assert [bar.text for bar in found] == [ALARMS, ALL_GREEN, LEAN, TWO, FIVE, WITHIN]
    assert all(bar.held for bar in found)
    assert found[0].measured == "0 of 5000, so at most 0.0006, from 400 blocks"
    assert [bar.measured for bar in found[2:]] == ["2 of 2"] * 4


@pytest.mark.long
def test_a_rule_that_alarms_falsely_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rule, "slower_level", lambda rule, look: 0.2)
    assert ALARMS not in missed(normal(0.004))  # the margin is far from such noise
    table = np.hstack([normal(0.02), normal(0.001)])
    assert ALARMS in missed(table)
    blocks = np.random.default_rng(3).choice(table[:, 0], (MERGES, LOOKS[-1]))
    above, below = critical(blocks, Rule(tests=2), Spread.of(table[:, 0]))
    green = ((above >= 0) & (below > 0)).mean()
    assert certified(table).all_green == pytest.approx(green, abs=0.03)
    monkeypatch.setattr(decision, "CONFIRM_ALPHA", 1e-9)
    assert ALARMS not in missed(table)


@pytest.mark.long
def test_a_side_that_is_always_slower_is_seen() -> None:
    """The signs, exchanged at random, hide it from all other bars."""
    assert not missed(np.hstack([normal(0.003), normal(0.003, seed=1) + 0.00125]))
    (bar,) = missed(np.hstack([normal(0.003), normal(0.003, seed=1) - 0.002])).values()
    assert bar == Bar(LEAN, False, f"1 of 2; not {DEVICE} of b1 (-0.20%)")
    assert LEAN in missed(np.full((30, 1), 0.002))
    assert LEAN not in missed(np.zeros((30, 1)))


@pytest.mark.parametrize(
    ("spread", "tolerance", "which"),
    [
        (0.0125, 0.02, {TWO, WITHIN}),
        (0.025, 0.02, {ALL_GREEN, TWO, FIVE, WITHIN}),
        (0.035, 0.05, {WITHIN}),
        (0.004, 0.008, {WITHIN}),
        (0.6, 0.5, {ALL_GREEN, WITHIN}),
    ],
)
def test_a_device_that_is_not_quiet_misses_bars(
    spread: float, tolerance: float, which: set[str]
) -> None:
    table = np.hstack([normal(0.002), normal(spread, seed=1)])
    found = missed(table, tolerance)
    assert set(found) == which
    for text in which - {ALL_GREEN}:
        assert found[text].measured.startswith(f"1 of 2; not {DEVICE} of b1 (")


# -- what blocks of one wave have in common ------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.25, 0.6])
@pytest.mark.parametrize("last", [4, 2])
def test_the_share_that_blocks_of_a_wave_have_in_common_is_found(share: float, last: int) -> None:
    """last: blocks in the last wave. Figures of very different spreads count alike."""
    random = np.random.default_rng(7)
    waves, figures = 40, 30
    common = np.repeat(random.normal(size=(waves, figures)), 4, axis=0)
    alone = random.normal(size=common.shape)
    table = (np.sqrt(share) * common + np.sqrt(1 - share) * alone) * np.logspace(-5, -1, figures)
    blocks = [replace(one, wave=f"wave {n // 4}") for n, one in enumerate(noise_of(table).blocks)]
    found = common_share(blocks[: len(blocks) - 4 + last])
    assert found == pytest.approx(share, abs=0.05)
