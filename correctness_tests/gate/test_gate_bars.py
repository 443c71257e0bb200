"""The bars of a certificate from both sides of each limit, and its numbers by their definitions."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import mean, stdev
from typing import Any

import numpy as np
import pytest
from scipy import stats

from correctness_tests.support.gate_samples import VERSIONS, block
from tinyllama.harness.gate import certify as module
from tinyllama.harness.gate.certify import (
    GRID,
    SLOWDOWNS,
    Certificate,
    Detection,
    bars,
    certify,
    common_share,
    critical,
)
from tinyllama.harness.gate.decision import (
    CONFIRM_BLOCKS,
    LOOKS,
    Call,
    Rule,
    Spread,
    confirmation_low,
    decide,
    smallest_found,
)
from tinyllama.harness.gate.noise import Block, Noise
from tinyllama.harness.gate.subject import DEVICE, HOST

FOUND = Detection(
    benchmark="a",
    metric=DEVICE,
    tolerance=0.02,
    spread=0.001,
    blocks=30,
    mean=-0.0012,
    leaning=0.5,
    by_formula=0.015,
    smallest=0.02,
    at_tolerance=1.0,
    detected={0.01: 0.5, 0.02: 1.0, 0.05: 1.0, 0.1: 1.0},
)


def certificate(*found: Detection, **fields: Any) -> Certificate:
    given: dict[str, Any] = {
        "device": "a card",
        "versions": {},
        "blocks": 30,
        "left_out": 2,
        "merges": 1000,
        "seed": 0,
        "false_alarms": 1,
        "false_alarms_bound": 5e-4,
        "all_green": 0.96,
        "claims": {"a": {DEVICE: 0.02}},
        "found": found or (FOUND,),
    }
    return Certificate(**{**given, **fields})


NAMES = (
    "false alarms in under 0.1% of merges of equal sides",
    "95% of merges of equal sides all green",
    "blocks of equal sides lean to neither by a fifth of the margin",
    "99% of slowdowns of 2% found by those that state 2%",
    "every slowdown of 5% found by those that state 2%",
    "99% of slowdowns of the tolerance found",
)


def detected(**shares: float) -> Detection:
    return replace(
        FOUND, detected=FOUND.detected | {float(n[1:]) / 100: s for n, s in shares.items()}
    )


@pytest.mark.parametrize(
    ("certificate", "missed"),
    [
        (certificate(), []),
        (certificate(false_alarms_bound=1e-3), [0]),
        (certificate(false_alarms_bound=0.99e-3), []),
        (certificate(all_green=0.95), []),
        (certificate(all_green=0.9499), [1]),
        (certificate(replace(FOUND, leaning=1e-3)), []),
        (certificate(replace(FOUND, leaning=0.99e-3)), [2]),
        (certificate(FOUND, replace(FOUND, benchmark="b", leaning=0.51e-3)), []),
        (certificate(FOUND, replace(FOUND, benchmark="b", leaning=0.49e-3)), [2]),
        (certificate(detected(p2=0.99)), []),
        (certificate(detected(p2=0.9899)), [3]),
        (certificate(detected(p5=0.9999)), [4]),
        (certificate(replace(FOUND, at_tolerance=0.99)), []),
        (certificate(replace(FOUND, at_tolerance=0.9899)), [5]),
    ],
)
def test_each_bar_has_its_limit(certificate: Certificate, missed: list[int]) -> None:
    found = bars(certificate)
    assert [one.text for one in found] == list(NAMES)
    assert [place for place, one in enumerate(found) if not one.held] == missed


def test_only_what_is_stated_is_asked() -> None:
    wide = replace(detected(p2=0.0, p5=0.0), tolerance=0.021)
    assert [one.text for one in bars(certificate(wide))] == [*NAMES[:3], NAMES[5]]
    unstated = certificate(replace(FOUND, benchmark="b"), replace(FOUND, metric=HOST))
    assert [one.text for one in bars(unstated)] == list(NAMES[:3])


def test_a_bar_tells_what_was_measured_and_what_missed_it() -> None:
    bad = replace(detected(p2=0.5), leaning=1e-9, smallest=None)
    told = [one.measured for one in bars(certificate(FOUND, bad))]
    assert told == [
        "1 of 1000, so at most 0.0005, from 30 blocks",
        "96.00%",
        f"1 of 2; not {DEVICE} of a (-0.12%)",
        f"1 of 2; not {DEVICE} of a (50.000%, smallest none)",
        "2 of 2",
        "2 of 2",
    ]
    (missed,) = (one for one in bars(certificate(detected(p5=0.9))) if not one.held)
    assert missed.measured == f"0 of 1; not {DEVICE} of a (90.000%, smallest 2.0%)"


# -- numbers --------------------------------------------------------------------------------------


def test_what_is_found_of_a_figure_is_as_defined() -> None:
    values = np.array([0.002, -0.001, 0.003, 0.004])
    rule, history = Rule(3, 0.006, 0.03), Spread(0.002, 4)
    every = [*SLOWDOWNS, *GRID, 0.03]
    shares = np.array([min(1.0, 20 * one) for one in every])
    found = module._found(("a", DEVICE), (values, rule, history), shares)
    assert (found.benchmark, found.metric) == ("a", DEVICE)
    assert (found.tolerance, found.spread, found.blocks) == (0.03, 0.002, 4)
    assert found.mean == pytest.approx(0.002)
    own = [float(one) for one in values]
    further = (mean(own) - 0.2 * math.log(1.006)) / (stdev(own) / 2)
    assert found.leaning == pytest.approx(float(stats.t.sf(further, 3)))
    mirrored = module._found(("a", DEVICE), (-values, rule, history), shares)
    assert mirrored.leaning == pytest.approx(found.leaning)
    assert found.by_formula == smallest_found(rule, history)
    assert found.smallest == 0.05
    assert found.at_tolerance == pytest.approx(0.6)
    assert found.detected == pytest.approx({0.01: 0.2, 0.02: 0.4, 0.05: 1.0, 0.1: 1.0})
    enough = np.array([0.99 if one == 0.1 else 0.0 for one in every])
    assert module._found(("a", DEVICE), (values, rule, history), enough).smallest == 0.1
    none = module._found(("a", DEVICE), (values, rule, history), 0.9 * shares)
    assert none.smallest is None


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


def waves(*values: list[float]) -> list[Block]:
    made, number = [], 0
    for wave, each in enumerate(values):
        for value in each:
            statistics = {"a": {DEVICE: value, HOST: 2 * value}}
            made.append(block(number, wave=f"w{wave}", statistics=statistics))
            number += 1
    return made


def test_the_share_of_waves_is_the_intraclass_correlation() -> None:
    groups = [[1.0, 2.0, 4.0], [5.0, 7.0], [6.0, 9.0, 9.5, 8.0]]
    every = [one for each in groups for one in each]
    middle = mean(every)
    between = sum(len(each) * (mean(each) - middle) ** 2 for each in groups) / 2
    within = sum((one - mean(each)) ** 2 for each in groups for one in each) / 6
    size = (9 - (9 + 4 + 16) / 9) / 2
    expected = (between - within) / (between + (size - 1) * within)
    assert common_share(waves(*groups)) == pytest.approx(expected)
    alone = [*waves(*groups), block(30, wave="alone"), block(31), block(32)]
    assert common_share(alone) == pytest.approx(expected), "of waves of several blocks"
    assert common_share(waves([1.0, 3.0], [1.0, 3.0])) == 0.0, "never below 0"


def test_of_fewer_than_two_waves_of_several_blocks_nothing_is_known() -> None:
    assert common_share([]) is None
    assert common_share([block(0), block(1)]) is None
    assert common_share(waves([1.0, 2.0], [3.0])) is None
    assert common_share(waves([1.0, 1.0], [1.0, 1.0])) is None, "figures that do not scatter"


def test_what_a_merge_decides_on_is_certified_whole() -> None:
    rules = {DEVICE: (0.005, 0.02), HOST: (0.02, 0.05)}
    full = {"a": {DEVICE: 0.001, HOST: 0.002}, "b": {DEVICE: 0.001, HOST: 0.002}}
    part = {"a": {DEVICE: 0.001, HOST: 0.002}, "b": {DEVICE: 0.001}}
    made = [block(n, statistics=full if n < 20 else part) for n in range(22)]
    noise = Noise("a card", made)
    claims = {"b": {HOST: 0.03}}
    found = certify(noise, VERSIONS, rules, claims, merges=10)
    figures = [(one.benchmark, one.metric, one.tolerance) for one in found.found]
    assert figures == [("a", DEVICE, 0.02), ("a", HOST, 0.05), ("b", HOST, 0.03)]
    assert (found.blocks, found.left_out, found.merges, found.seed) == (20, 2, 10, 0)
    assert found.all_green == 1.0
    few = certify(noise, VERSIONS, rules, benchmarks=["a"], merges=10, seed=3)
    assert [one.benchmark for one in few.found] == ["a", "a"]
    assert (few.blocks, few.left_out, few.seed) == (22, 0, 3)
    device = {DEVICE: rules[DEVICE]}
    assert [one.blocks for one in certify(noise, VERSIONS, device, merges=1).found] == [22, 22]
    text = (
        "19 of 21 A/A blocks of a card with these versions hold every figure, and a certificate "
        f"needs 20 or more: record more; {HOST} of b is missing from 2"
    )
    with pytest.raises(ValueError, match=f"^{text}$"):
        certify(Noise("a card", made[1:]), VERSIONS, rules, merges=10)


def test_equal_sides_are_counted_as_they_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks; a merge is green where every figure is, and an alarm where one is confirmed."""
    still = np.zeros(20)
    rule, history = Rule(2, 0.006, 0.03), Spread(0.001, 20)
    monkeypatch.setattr(module, "CHUNK", 4)
    judged = [(still, rule, history), (still, rule, history)]
    alarms, green, shares = module._simulate(judged, 10, np.random.default_rng(0))
    assert (alarms, green) == (0, 10)
    (slower,), _ = critical(np.zeros((1, LOOKS[-1])), rule, history)
    sure = -float(confirmation_low(np.zeros(CONFIRM_BLOCKS), history))
    least = math.expm1(max(float(slower), sure))
    every = [*SLOWDOWNS, *GRID, rule.tolerance]
    assert shares.shape == (2, len(every))
    assert shares[1].tolist() == [float(one > least) for one in every]
