"""What both sides have, before anything is compiled: each way in which they differ, in words; and
the state of one benchmark."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from correctness_tests.support.gate_fakes import REGISTERED
from tinyllama.harness.gate.accepted import Accepted, Entry
from tinyllama.harness.gate.decision import Rule, Spread
from tinyllama.harness.gate.figures import Series
from tinyllama.harness.gate.listing import Stopped, check_identities, matched, unable
from tinyllama.harness.gate.noise import Noise
from tinyllama.harness.gate.pair import BASE, CANDIDATE, Tree
from tinyllama.harness.gate.setting import BenchmarkState, Setting, margin_of
from tinyllama.harness.gate.side import Benchmark
from tinyllama.harness.gate.subject import DEVICE, HOST
from tinyllama.harness.measure.op_contender import Timed
from tinyllama.harness.records.verdict import Figure, Outcome, Verdict

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
PATHS = {BASE: Path("/trees/base"), CANDIDATE: Path("/trees/candidate")}
TREES = {n: Tree(n, path, "python", n, Path("/caches")) for n, path in PATHS.items()}


def setting(entries: tuple[Entry, ...] = (), **fields: Any) -> Setting:
    accepted = Accepted(Path("/accepted.toml"), entries)
    watch: Any = None
    sides = TREES[BASE], TREES[CANDIDATE]
    return Setting(
        *sides, GPU, REGISTERED, Noise("a card"), accepted, watch, lambda *_: ({}, {}), **fields
    )


def who(**candidate: Any) -> dict[str, dict[str, Any]]:
    """What both sides tell of themselves; of the candidate, these fields."""
    told = {"device": "a card", "versions": {"torch": "2"}, "python": "/python"}
    sides: dict[str, dict[str, Any]] = {n: {**told, "root": str(p)} for n, p in PATHS.items()}
    sides[CANDIDATE].update(candidate)
    return sides


BOTH = {"toolchains": True}


@pytest.mark.parametrize(
    ("fields", "given", "verdict"),
    [
        ({}, {}, None),
        (
            {},
            {"root": "/other"},
            Verdict(
                CANDIDATE,
                Outcome.WORKER_DIED,
                "the candidate ran the code in /other, not that in /trees/candidate",
            ),
        ),
        (
            {},
            {"device": "another"},
            Verdict("device", Outcome.OTHER_DEVICE_OR_VERSION, "a card and another"),
        ),
        (BOTH, {"device": "b"}, Verdict("device", Outcome.OTHER_DEVICE_OR_VERSION, "a card and b")),
        (
            {},
            {"versions": {"torch": "3"}},
            Verdict(
                "versions", Outcome.OTHER_DEVICE_OR_VERSION, "{'torch': '2'} and {'torch': '3'}"
            ),
        ),
        (BOTH, {"versions": {"torch": "3"}}, None),
        (BOTH, {"python": "/other"}, None),
        (
            BOTH,
            {},
            Verdict("toolchain", Outcome.MISSING, "both sides are /python: nothing is compared"),
        ),
    ],
)
def test_sides_that_cannot_be_compared_stop_it(
    fields: dict[str, Any], given: dict[str, Any], verdict: Verdict | None
) -> None:
    if verdict is None:
        check_identities(setting(**fields), TREES, who(**given))
        return
    with pytest.raises(Stopped) as stopped:
        check_identities(setting(**fields), TREES, who(**given))
    assert stopped.value.verdict == verdict
    assert str(stopped.value) == str(verdict)


def test_one_tree_is_compared_with_itself_only_where_that_is_meant() -> None:
    same = dict.fromkeys((BASE, CANDIDATE), TREES[BASE])
    told = who(root=str(PATHS[BASE]), python="/other")
    with pytest.raises(Stopped) as stopped:
        check_identities(setting(), same, told)
    text = "both sides are /trees/base: nothing is compared"
    assert stopped.value.verdict == Verdict("trees", Outcome.MISSING, text)
    for meant in (setting(toolchains=True), setting(measure_all=True)):
        check_identities(meant, same, told)


def test_a_base_that_cannot_run_is_no_base() -> None:
    assert (unable(BASE), unable(CANDIDATE)) == (Outcome.NO_BASE, Outcome.WORKER_DIED)
    told = who()
    told[BASE]["root"] = "/other"
    with pytest.raises(Stopped) as stopped:
        check_identities(setting(), TREES, told)
    assert stopped.value.verdict.outcome is Outcome.NO_BASE


# -- benchmarks -----------------------------------------------------------------------------------


def benchmark(name: str, op: str = "norm", **fields: Any) -> Benchmark:
    return Benchmark(name, Timed(op, "eager", 0, "fp32"), "module", **fields)


def named(*names: str, **fields: Any) -> dict[str, Benchmark]:
    return {name: benchmark(name, op=name[0], **fields) for name in names}


def stopped_by(setting: Setting, *sides: dict[str, Benchmark]) -> Verdict:
    with pytest.raises(Stopped) as stopped:
        matched(setting, *sides)
    return stopped.value.verdict


def test_benchmarks_of_one_side_alone_are_told() -> None:
    gone = Entry("gone", "why", "9.0", removed=True)
    base, candidate = named("a", "gone", "lost"), named("a", "new")
    listed = matched(setting((gone,)), base, candidate)
    assert (list(listed.found), list(listed.new)) == (["a"], ["new"])
    assert listed.new["new"].benchmark == candidate["new"]
    lost = Verdict("lost", Outcome.MISSING, "the base has it, the candidate does not")
    removed = Verdict("gone", Outcome.SAME, "removed, and accepted as such")
    assert listed.others == [removed, lost]
    listed = matched(setting((gone,), toolchains=True), base, candidate)
    assert listed.new == {}
    text = "the base's interpreter does not have it"
    assert listed.others == [removed, lost, Verdict("new", Outcome.NO_BASELINE, text)]


def test_without_benchmarks_nothing_is_compared() -> None:
    some = named("a")
    none = Verdict("benchmarks", Outcome.MISSING, "neither side has a benchmark")
    assert stopped_by(setting(), {}, {}) == none
    with pytest.raises(Stopped) as stopped:
        matched(setting(), {}, {}, {"op a declares no timed cases": 2, "no GPU": 1})
    text = "neither side has a benchmark; op a declares no timed cases; no GPU"
    assert stopped.value.verdict == replace(none, text=text)
    text = "it has no benchmark: nothing is compared"
    assert stopped_by(setting(), {}, some) == Verdict(BASE, Outcome.NO_BASE, text)
    assert [one.outcome for one in matched(setting(), some, {}).others] == [Outcome.MISSING]
    verdict = stopped_by(setting((Entry("b", "why", "9.0", amount=0.1),)), some, some)
    assert (verdict.name, verdict.outcome) == ("accepted", Outcome.MISSING)
    assert "there is no such benchmark here" in verdict.text
    for side in ((some, named("b")), (named("b"), some)):
        matched(setting((Entry("b", "why", "9.0", amount=0.1),)), *side)


def test_only_what_is_asked_for_is_compared() -> None:
    both = named("a1", "a2", "b1", "c1")
    both["step"] = replace(benchmark("step", op="a"), factory="tinyllama:step")
    both["other"] = replace(benchmark("other"), timed="a")
    assert list(matched(setting(), both, both).found) == list(both)
    assert list(matched(setting(ops=("a",)), both, both).found) == ["a1", "a2"]
    assert list(matched(setting(ops=("c", "a")), both, both).found) == ["a1", "a2", "c1"]
    assert list(matched(setting(only=lambda n: n == "b1"), both, both).found) == ["b1"]
    few = setting(ops=("a",), only=lambda n: n.endswith("1"))
    assert list(matched(few, both, both).found) == ["a1"]
    text = "--op d: neither side has a benchmark of it"
    expected = Verdict("benchmarks", Outcome.MISSING, text)
    assert stopped_by(setting(ops=("a", "d", "e")), both, both) == expected
    assert matched(setting(ops=("d",)), both, named("d1")).found == {}


def test_of_both_sides_bounds_the_stricter_count() -> None:
    base = named("a", slowdowns={DEVICE: 0.02, HOST: 0.05}, layouts={"strided": 2.0, "z": 1.2})
    layouts = {"strided": 1.5, "y": 3.0, "z": 1.9}
    candidate = named("a", slowdowns={DEVICE: 0.03, "x": 0.1}, layouts=layouts)
    found = matched(setting(), base, candidate).found["a"].benchmark
    assert found.slowdowns == {DEVICE: 0.02, HOST: 0.05, "x": 0.1}
    assert found.layouts == {"strided": 1.5, "y": 3.0, "z": 1.2}
    assert replace(found, slowdowns={}, layouts={}) == benchmark("a", op="a")


# -- the state of one -----------------------------------------------------------------------------


def test_margins_are_of_a_metric_and_on_a_cpu_one() -> None:
    assert [margin_of(m, GPU) for m in (DEVICE, HOST)] == [0.005, 0.02]
    assert [margin_of(m, CPU) for m in (DEVICE, HOST)] == [0.02, 0.02]


def test_the_state_of_a_benchmark_is_told_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    state = BenchmarkState(benchmark("a"))
    assert (state.name, state.blocks, state.again) == ("a", 0, 0)
    empty = state.report()
    assert (empty["outcome"], empty["text"]) == (None, None)
    one = Series(Rule(1), Spread(), statistics=[1.0, 2.0], again=[3.0], excesses=[4.0])
    other = Series(Rule(1), Spread(), statistics=[5.0], again=[6.0, 7.0])
    state.series = {DEVICE: one, HOST: other}
    assert (state.blocks, state.again) == (1, 1)
    figure = Figure(HOST, Outcome.SAME, "text")
    state.figures = [Figure(DEVICE, Outcome.SLOWER, "first"), figure]
    assert state.settled(HOST) is figure
    assert state.settled("other") is None
    state.verdict = Verdict("a", Outcome.SLOWER, "slow")
    state.moved = ["k"]
    clock = iter([1.0, 3.0, 10.0, 15.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    for _ in range(2):
        with state.takes("blocks"):
            pass
    assert state.report() == {
        "outcome": "SLOWER",
        "text": "slow",
        "figures": [
            {
                "metric": name,
                "outcome": outcome,
                "text": text,
                "before": None,
                "after": None,
                "ratio": None,
            }
            for name, outcome, text in ((DEVICE, "SLOWER", "first"), (HOST, "SAME", "text"))
        ],
        "blocks": {DEVICE: [1.0, 2.0], HOST: [5.0]},
        "slow_turns": {DEVICE: [4.0], HOST: []},
        "confirmation": {DEVICE: [3.0], HOST: [6.0, 7.0]},
        "moved": ["k"],
        "seconds": {"blocks": 7.0},
    }
