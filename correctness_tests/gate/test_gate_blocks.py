"""Blocks are taken in waves, and end once the merge is decided."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import numpy as np
import pytest

from correctness_tests.support.gate_fakes import SECONDS, SIDES, Script, died, history, outcomes
from tinyllama.harness.gate.benchmarks import Benchmark
from tinyllama.harness.gate.decision import CONFIRM_BLOCKS, LOOKS
from tinyllama.harness.gate.pair import BASE, CANDIDATE, SideError, Tree
from tinyllama.harness.machine import worker
from tinyllama.harness.machine.worker import WorkerError
from tinyllama.harness.records.verdict import Outcome, Verdict


def noisy(script: Script, name: str, spread: float = 0.05) -> None:
    """The candidate's times of a benchmark differ by so much from turn to turn."""
    random = np.random.default_rng(0)
    factors = (math.exp(random.normal(0.0, spread)) for _ in itertools.count())

    def turn(_: str) -> dict[str, float]:
        factor = next(factors)
        return {m: SECONDS[m] * factor for m in script.slowdowns[CANDIDATE]}

    script.on(CANDIDATE, "turn", turn, name)


# -- once one is SLOWER ---------------------------------------------------------------------------


@pytest.mark.long
def test_once_one_is_slower_what_is_undecided_is_not_decided() -> None:
    script = Script("a", "b", "c")
    script.slower("a", device_seconds=1.05)
    noisy(script, "b")
    found = script.run()
    assert outcomes(found) == {"a": Outcome.SLOWER, "b": Outcome.NOT_DECIDED, "c": Outcome.SAME}
    assert script.status == 10
    text = found["b"].text
    assert text.startswith("a is SLOWER, which decides the merge; so far device_seconds ")
    assert f"in {LOOKS[1]} blocks" in text
    assert not found["b"].outcome.green
    assert script.launches == 1 + LOOKS[1] + CONFIRM_BLOCKS + 1


@pytest.mark.long
def test_all_verdicts_are_found_where_that_is_asked_for() -> None:
    script = Script("a", "b")
    script.slower("a", device_seconds=1.05)
    noisy(script, "b", 0.2)
    found = script.run(all_verdicts=True)
    assert outcomes(found) == {"a": Outcome.SLOWER, "b": Outcome.INCONCLUSIVE}
    assert f"in {LOOKS[-1]} blocks" in found["b"].text
    assert script.launches == 1 + LOOKS[-1] + CONFIRM_BLOCKS + 1, "confirmed once"
    assert found["a"].text.count("confirmed by") == 1, "and said once"


@pytest.mark.long
def test_a_slowdown_that_is_not_confirmed_decides_nothing() -> None:
    script = Script("a", "b")
    script.slower("a", device_seconds=1.05)
    script.on(CANDIDATE, "turn", SECONDS, "a", when=lambda: script.confirming)
    noisy(script, "b", 0.2)
    found = script.run()
    assert found["a"].outcome is Outcome.INCONCLUSIVE
    assert f"in {LOOKS[-1]} blocks" in found["b"].text, "it was decided"


def test_other_times_of_what_is_slower_take_no_more_blocks() -> None:
    script = Script("a")
    random = np.random.default_rng(0)

    def turn(_: str) -> dict[str, float]:
        host = SECONDS["host_seconds"] * math.exp(random.normal(0.0, 0.3))
        return {"device_seconds": 1.05 * SECONDS["device_seconds"], "host_seconds": host}

    script.on(CANDIDATE, "turn", turn)
    verdict = script.run()["a"]
    assert verdict.outcome is Outcome.SLOWER
    assert f"in {LOOKS[1]} blocks, neither certainly" in verdict.text, "of the host"
    assert script.launches == 1 + LOOKS[1] + CONFIRM_BLOCKS + 1


# -- the ops whose own files differ come first ----------------------------------------------------


@pytest.fixture
def trees(tmp_path: Path) -> Callable[..., dict[str, Verdict]]:
    """Runs a script on two trees, in which the file of the op "a" differs, and "b" to "d" use it;
    "e" imports neither."""
    for side, name in itertools.product(SIDES, "abcde"):
        (tmp_path / side / "ops").mkdir(parents=True, exist_ok=True)
        (tmp_path / side / f"ops/{name}.py").touch()

    def run(script: Script, **changes: Any) -> dict[str, Verdict]:
        def sources(tree: Tree, benchmark: Benchmark) -> Any:
            own = {f"ops/{benchmark.name}.py": "same", "harness.py": "same"}
            used = {} if benchmark.name == "e" else {"ops/a.py": tree.name}
            return own | used, own | used

        setting = script.setting()
        both = {side: replace(getattr(setting, side), root=tmp_path / side) for side in SIDES}
        return script.run(sources=sources, **both, **changes)

    return run


def asked_of(script: Script, method: str) -> list[str]:
    """The benchmarks of which a method was asked, in order."""
    return list(dict.fromkeys(args[0] for _, _, m, args in script.asked if m == method))


def test_an_op_whose_own_file_differs_decides_a_merge_before_others_are_prepared(
    trees: Callable[..., dict[str, Verdict]],
) -> None:
    script = Script(*"bcade")
    script.names[CANDIDATE].append("new")
    script.slower("a", device_seconds=1.05)
    found = trees(script)
    assert outcomes(found) == {
        "a": Outcome.SLOWER,
        **dict.fromkeys("bcd", Outcome.NOT_DECIDED),
        "e": Outcome.IDENTICAL,
        "new": Outcome.NOT_DECIDED,
    }
    assert found["b"].text == "a is SLOWER, which decides the merge; it was not measured"
    assert asked_of(script, "begin") == asked_of(script, "turn") == ["a"]


@pytest.mark.long
@pytest.mark.parametrize("at_once", [1, 3])
def test_others_are_prepared_where_the_nearest_decide_nothing(
    trees: Callable[..., dict[str, Verdict]], at_once: int
) -> None:
    script = Script(*"bcade", noise=2e-4)
    script.names[CANDIDATE].append("new")
    script.slower("d", device_seconds=1.05)
    found = trees(script, at_once=at_once)
    assert outcomes(found) == {
        **dict.fromkeys("abc", Outcome.SAME),
        "d": Outcome.SLOWER,
        "e": Outcome.IDENTICAL,
        "new": Outcome.NEW,
    }
    assert next(one for one in asked_of(script, "turn") if one != "new") == "a"
    steps = [
        m for _, _, m, args in script.asked if args[:1] != ("new",) and m in ("verify", "turn")
    ]
    together = "turn" not in steps[: steps.count("verify")]
    assert together is (at_once > 1), "where several pairs work, all are prepared at once"
    verified = [args[0] for _, _, m, args in script.asked if m == "verify"]
    assert sorted(verified) == [*sorted("aabbccdd"), "new"], "each once a side"
    for one in script.session.found.values():
        most = LOOKS[1 if one.name == "d" else 0]
        assert all(len(series.statistics) == most for series in one.series.values())


@pytest.mark.long
def test_what_the_nearest_leave_undecided_waits_for_the_others(
    trees: Callable[..., dict[str, Verdict]],
) -> None:
    script = Script(*"abcd", noise=2e-4)
    noisy(script, "a", 0.02)
    found = trees(script, noise=history("a", spread=0.02))
    counts = {
        name: {len(series.statistics) for series in one.series.values()}
        for name, one in script.session.found.items()
    }
    assert counts == {"a": {max(counts["a"])}, **{name: {LOOKS[0]} for name in "bcd"}}
    assert max(counts["a"]) > LOOKS[0]
    assert set(outcomes(found)) == set("abcd")


def test_everything_is_prepared_at_once_where_all_verdicts_are_asked_for(
    trees: Callable[..., dict[str, Verdict]],
) -> None:
    script = Script(*"bcade")
    script.slower("a", device_seconds=1.05)
    found = trees(script, all_verdicts=True)
    assert found["a"].outcome is Outcome.SLOWER
    assert found["b"].outcome is Outcome.SAME
    assert asked_of(script, "turn")[0] == "b"


@pytest.mark.long
def test_further_cases_are_compared_where_an_own_file_of_the_op_differs(
    trees: Callable[..., dict[str, Verdict]],
) -> None:
    script = Script(*"bcade", noise=2e-4)
    script.names[CANDIDATE].append("new")
    script.further = {"a", "b", "e", "new"}
    script.slower("a", device_seconds=1.3)
    found = trees(script, all_verdicts=True)
    assert outcomes(found) == {"a": Outcome.SLOWER, "c": Outcome.SAME, "d": Outcome.SAME}
    for blind in ("measure_all", "toolchains"):
        script = Script("a", "c", noise=2e-4)
        script.further = {"a"}
        if blind == "toolchains":
            script.identity[BASE]["versions"] = {"torch": "1"}
        assert set(outcomes(trees(script, **{blind: True}))) == {"c"}, blind


def test_a_further_case_that_the_candidate_lacks_is_missing() -> None:
    script = Script("a", "b")
    script.further = {"b"}
    script.names[CANDIDATE].remove("b")
    assert script.run()["b"].outcome is Outcome.MISSING


# -- waves ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at_once", "waves"), [(1, [1] * 4), (2, [2, 2]), (3, [2, 2]), (4, [4]), (8, [4])]
)
def test_a_look_is_one_wave_of_as_many_pairs_as_may_work_at_once(
    at_once: int, waves: list[int]
) -> None:
    script = Script("a", "b", "c", noise=2e-4)
    found: list[int] = []

    def opened(*args: Any) -> Any:
        found.append(args[3])
        return script.pairs(*args)

    assert set(outcomes(script.run(at_once=at_once, pairs=opened)).values()) == {Outcome.SAME}
    beside = [min(at_once, 2)] if at_once > 1 else []  # prepare with the first
    assert found == [1, *beside, *waves]
    for one in script.session.found.values():
        assert {len(series.statistics) for series in one.series.values()} == {LOOKS[0]}
    launches = range(script.launches - LOOKS[0] + 1, script.launches + 1)
    for launch, side in itertools.product(launches, SIDES):
        turns = [a[0] for at, s, m, a in script.asked if (at, s, m) == (launch, side, "turn")]
        assert set(turns) == {"a", "b", "c"}, "each pair gives a block of every benchmark"


def test_what_fails_in_one_block_of_a_wave_is_not_timed_in_the_others() -> None:
    script = Script("a", "b")
    script.on(BASE, "turn", died(), "a", launch=5)
    found = script.run(at_once=4)
    assert outcomes(found) == {"a": Outcome.WORKER_DIED, "b": Outcome.SAME}
    turns = [(at, args[0]) for at, _, method, args in script.asked if method == "turn"]
    ran = list(dict.fromkeys(turns))
    assert (3, "a") in ran[: ran.index((5, "a"))], "before it in that step"
    assert "a" not in [name for _, name in ran[ran.index((5, "a")) + 1 :]]


# -- the judge's clock ----------------------------------------------------------------------------


def test_what_no_process_answered_after_all_were_ended_is_no_verdict() -> None:
    script = Script("a")

    def ended(name: str) -> None:
        worker.end_all()
        raise died()

    script.on(BASE, "turn", ended, "a")
    try:
        with pytest.raises(SideError):
            script.run()
        assert script.session.found["a"].verdict is None
    finally:
        worker.end_all(False)


@pytest.mark.parametrize("alone", [False, True])
def test_what_found_no_memory_beside_others_is_prepared_again_alone(alone: bool) -> None:
    script = Script(*"abc", noise=2e-4)
    full = WorkerError("the device's memory is full", types=["torch.OutOfMemoryError"])
    failed = Mock(side_effect=full)
    script.on(CANDIDATE, "verify", failed, "b", when=lambda: alone or not failed.called)
    found = script.run(at_once=3)
    expected = Outcome.WORKER_DIED if alone else Outcome.SAME
    assert outcomes(found) == {"a": Outcome.SAME, "b": expected, "c": Outcome.SAME}
    assert failed.mock_calls == [call("b")] * (2 if alone else 1)
