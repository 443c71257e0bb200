"""A device's A/A blocks as a file, the error rates that follow from them, and the bars that these
must hold."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from scipy import stats

from tinyllama.harness.gate.calibrate import (
    SCHEMA,
    Block,
    Certificate,
    Noise,
    certify,
    critical,
    noise_path,
)
from tinyllama.harness.gate.sequential_test import LOOKS, Call, Floats, Rule, Spread, decide
from tinyllama.harness.records.results import records

DEVICE, HOST = "device_seconds", "host_seconds"
CARD, VERSIONS = "A Card 1", {"torch": "2.11"}


def block(number: int = 0, **fields: Any) -> Block:
    date = f"2030-01-01T{number // 60:02d}:{number % 60:02d}:00Z"
    figures = {"copy-ours": {DEVICE: 0.001 * (number + 1), HOST: -0.01}}
    defaults = {"date": date, "commit": "c" * 40, "versions": VERSIONS, "pairs": 40}
    return Block(**{**defaults, "statistics": figures, **fields})


MERGES = 5000

# -- the file of A/A blocks -----------------------------------------------------------------------


def test_blocks_come_back_and_records_do_not_meet_them(tmp_path: Path) -> None:
    noise = Noise(CARD)
    for number in range(3):
        noise.record(tmp_path, block(number))
    assert (tmp_path / "a-card-1" / "gate" / "noise.json").exists()
    assert Noise.load(tmp_path, CARD) == noise
    assert [*records(tmp_path), *records(tmp_path, CARD)] == []


def test_blocks_that_are_recorded_at_once_all_stay(tmp_path: Path) -> None:
    """As two GPUs of one machine are certified into one folder."""

    def many(first: int) -> None:
        for number in range(first, first + 20, 2):
            Noise(CARD).record(tmp_path, block(number))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(many, (10, 11)))
    assert len(Noise.load(tmp_path, CARD).blocks) == 20
    assert [file.name for file in noise_path(tmp_path, CARD).parent.iterdir()] == ["noise.json"]


def test_only_blocks_of_the_same_versions_count() -> None:
    newer = {"torch": "2.12"}
    noise = Noise(CARD, [block(0), block(1), block(2, versions=newer)])
    assert noise.spread("copy-ours", DEVICE, VERSIONS) == Spread.of([0.001, 0.002])
    assert noise.spread("copy-ours", DEVICE, newer) == Spread.of([0.003])
    assert noise.spread("copy-ours", DEVICE, {**VERSIONS, "triton": "3.6"}) == Spread()
    assert noise.spread("copy-theirs", DEVICE, VERSIONS) == Spread()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": SCHEMA - 1}, "schema"),
        ({"device": "a-card-1"}, "device 'a-card-1' is not 'A Card 1'"),
        ({"blocks": 2}, "blocks"),
        ({"blocks": [{}]}, "date"),
    ],
    ids=str,
)
def test_a_broken_file_is_an_error_that_names_file_field_and_fix(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    Noise(CARD, [block()]).save(tmp_path)
    path = noise_path(tmp_path, CARD)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    message = rf"noise\.json holds no A/A blocks.*{said}.*delete it and certify again"
    with pytest.raises(ValueError, match=message):
        Noise.load(tmp_path, CARD)


# -- error rates ----------------------------------------------------------------------------------


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


def certified(
    table: Floats, margin: float = 0.005, tolerance: float = 0.02, merges: int = MERGES
) -> Certificate:
    rules = {(f"b{place}", DEVICE): (margin, tolerance) for place in range(table.shape[1])}
    return certify(noise_of(table), VERSIONS, rules, merges)


@pytest.mark.parametrize("spread", [0.004, 0.05])
@pytest.mark.parametrize("history", [Spread(), Spread(0.004, 9)], ids=["no history", "history"])
def test_a_slowdown_that_is_critical_decides_as_the_gate_does(
    history: Spread, spread: float
) -> None:
    """What is SLOWER, or green, before and after each critical slowdown."""
    statistics = np.random.default_rng(3).normal(0, spread, (6, LOOKS[-1]))
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
        for slowdown in np.linspace(min(green, slower) - 0.01, slower - 1e-9, 5):
            call = decided(merge, slowdown)
            assert (call in (Call.SAME, Call.FASTER)) == (slowdown < green)


@pytest.mark.long
def test_a_certificate_keeps_the_noise_that_benchmarks_share() -> None:
    """Ten benchmarks that all show the same are green together as often as one is."""
    alone = certified(normal(0.02)).all_green
    same = certified(np.repeat(normal(0.02), 10, axis=1)).all_green
    different = certified(columns(10, 0.02)).all_green
    assert 0.7 < alone < 0.95
    assert same == pytest.approx(alone, abs=0.03)
    assert different == pytest.approx(alone**10, abs=0.05)


def test_a_certificate_needs_20_blocks_that_hold_every_figure() -> None:
    rules = {(name, DEVICE): (0.005, 0.02) for name in ("b0", "b1")}
    noise = noise_of(columns(2, 0.005)[:20])
    assert certify(noise, VERSIONS, rules, 100).blocks == 20
    with pytest.raises(ValueError, match="0 of 0 A/A blocks of A Card 1 with these versions"):
        certify(noise, {"torch": "2.12"}, rules)
    with pytest.raises(ValueError, match=f"{DEVICE} of new is missing from 20"):
        certify(noise, VERSIONS, {**rules, ("new", DEVICE): (0.005, 0.02)})
    last = noise.blocks.pop()
    noise.blocks.append(replace(last, statistics={"b0": {DEVICE: 0.0}}))
    with pytest.raises(ValueError, match=f"19 of 20 .*{DEVICE} of b1 is missing from 1"):
        certify(noise, VERSIONS, rules)
    noise.blocks.append(last)
    partly = certify(noise, VERSIONS, rules, 100)
    assert (partly.blocks, partly.left_out) == (20, 1)


# -- the bars -------------------------------------------------------------------------------------

ALARMS, ALL_GREEN, FOUND = range(3)


def missed(table: Floats, tolerance: float = 0.02) -> set[int]:
    """The numbers of the bars that do not hold."""
    bars = certified(table, tolerance=tolerance).bars()
    return {number for number, holds in enumerate(bars.values()) if not holds}


def test_a_quiet_device_holds_every_bar() -> None:
    bars = certified(columns(2, 0.004)).bars()
    assert all(bars.values())
    assert "0 of 5000, so at most 0.0006" in next(iter(bars))


@pytest.mark.long
def test_a_rule_that_alarms_falsely_misses_its_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rule, "slower_level", lambda rule, look: 0.2)
    assert ALARMS not in missed(normal(0.004))  # the margin is far from such noise
    assert ALARMS in missed(np.hstack([normal(0.02), normal(0.001)]))


@pytest.mark.parametrize(
    ("spread", "tolerance", "which"),
    [
        (0.0125, 0.02, {FOUND}),
        (0.025, 0.02, {ALL_GREEN, FOUND}),
        (0.035, 0.05, {FOUND}),
        (0.6, 0.5, {ALL_GREEN, FOUND}),
    ],
)
def test_a_device_that_is_not_quiet_misses_bars(
    spread: float, tolerance: float, which: set[int]
) -> None:
    assert missed(np.hstack([normal(0.002), normal(spread, seed=1)]), tolerance) == which
