"""Nothing that keeps a benchmark from being compared is green: sides that answer from a script go
wrong in each way there is, and the outcome and the exit status say which."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from correctness_tests.support.gate_fakes import (
    SECONDS,
    SIDES,
    Script,
    Watching,
    died,
    hung,
    proof,
    wrong,
)
from tinyllama.harness.gate.metric import DEVICE, HOST
from tinyllama.harness.gate.pair import BASE, CANDIDATE
from tinyllama.harness.machine.worker import WorkerError
from tinyllama.harness.records.verdict import Outcome, Verdict

OF_ALL = ("start", "make", "identity", "benchmarks")  # what is asked before there are benchmarks
OF_ONE = ("begin", "inputs", "counted", "compiled", "verify")  # and of each, before it is timed


def settled(script: Script, name: str) -> Verdict:
    verdict = script.session.compared[name].verdict
    assert verdict is not None
    return verdict


# -- what is compared -------------------------------------------------------------------------


def test_a_gate_without_benchmarks_is_missing() -> None:
    script = Script()
    for side in SIDES:
        script.names[side] = []
    script.ends(Outcome.MISSING, name="benchmarks")


def test_other_inputs_under_one_name_are_another_benchmark() -> None:
    script = Script("a", "b")
    script.on(CANDIDATE, "inputs", 8, "a")
    script.ends(Outcome.NO_BASELINE, "its inputs are not those of the base")


def test_a_tree_compared_with_itself_is_missing() -> None:
    script = Script()
    script.alike("a")
    tree = script.setting().candidate
    script.identity[BASE]["root"] = str(tree.root)
    base = replace(tree, name=BASE)
    verdicts = script.run(base=base)
    assert verdicts["trees"].outcome is Outcome.MISSING
    assert script.status == 15


@pytest.mark.parametrize(("side", "outcome"), [(BASE, 17), (CANDIDATE, 17)])
def test_a_side_that_runs_the_other_sides_code_ends_the_gate(side: str, outcome: int) -> None:
    script = Script()
    script.alike("a")
    other_side = BASE if side == CANDIDATE else CANDIDATE
    script.identity[side]["root"] = f"/trees/{other_side}"
    script.run()
    assert script.status == outcome
    assert f"the {side} ran the code in /trees/{other_side}" in script.verdicts[0].text


@pytest.mark.parametrize(
    ("what", "value"), [("device", "another device"), ("versions", {"torch": "3.2"})]
)
def test_another_device_or_other_versions_give_status_13(what: str, value: Any) -> None:
    script = Script()
    script.alike("a")
    script.identity[BASE][what] = value
    script.ends(Outcome.OTHER_DEVICE_OR_VERSION, name=what)


def test_two_equal_toolchains_are_missing() -> None:
    script = Script()
    assert script.run(toolchains=True)["toolchain"].outcome is Outcome.MISSING
    assert script.status == 15


# -- processes --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", OF_ALL)
@pytest.mark.parametrize("how", [died, hung])
@pytest.mark.parametrize(
    ("side", "outcome"), [(BASE, Outcome.NOT_JUDGED), (CANDIDATE, Outcome.NOT_JUDGED)]
)
def test_a_side_that_cannot_begin_ends_the_gate(
    side: str, outcome: Outcome, how: Callable[[], WorkerError], method: str
) -> None:
    """It does not import, does not build, has no such API, dies or hangs."""
    script = Script("a", "b")
    script.on(side, method, how())
    script.ends(outcome, str(how()), name=side)


@pytest.mark.parametrize("method", ["warm_up_blas", *OF_ONE, "end"])
@pytest.mark.parametrize("how", [died, hung])
@pytest.mark.parametrize("side", SIDES)
def test_a_worker_that_dies_preparing_a_benchmark_spoils_no_other(
    side: str, how: Callable[[], WorkerError], method: str
) -> None:
    script = Script("a", "b")
    script.on(side, method, how(), None if method == "warm_up_blas" else "a", launch=1)
    script.ends(Outcome.NOT_JUDGED, str(how()))


@pytest.mark.parametrize("launch", [2, 5], ids=["first", "fourth"])
@pytest.mark.parametrize("method", ["begin", "make_ready", "turn", "proofs", "end"])
@pytest.mark.parametrize("side", SIDES)
def test_a_worker_that_dies_in_a_block_spoils_no_other_benchmark(
    side: str, method: str, launch: int
) -> None:
    script = Script("a", "b")
    script.on(side, method, died(), "a", launch=launch)
    script.ends(Outcome.NOT_JUDGED)
    blocks = script.session.report()["benchmarks"]["a"]["blocks"]
    completed = launch - 2  # after the preparation, and but for the block in which it died
    assert {metric: len(taken) for metric, taken in blocks.items()} == (
        {DEVICE: completed, HOST: completed} if completed else {}
    )


def test_a_pair_that_does_not_start_again_leaves_nothing_green() -> None:
    script = Script("a", "b")
    script.on(BASE, "make", died(), launch=3)
    script.run()
    assert [verdict.outcome for verdict in script.verdicts] == [Outcome.NOT_JUDGED] * 3
    assert script.status == 17


@pytest.mark.parametrize("method", ["begin", "make_ready", "turn"])
@pytest.mark.parametrize("side", SIDES)
def test_a_worker_that_dies_confirming_makes_its_benchmark_not_judged(
    side: str, method: str
) -> None:
    script = Script("a", "b")
    script.slower("a", device_seconds=1.05)
    script.on(side, method, died(), "a", when=lambda: script.confirming)
    script.ends(Outcome.NOT_JUDGED)


@pytest.mark.parametrize("method", ["start", "begin", "profiles"])
def test_a_worker_that_dies_explaining_a_slowdown_leaves_it_slower(method: str) -> None:
    script = Script("a", "b")
    script.slower("a", device_seconds=1.05)
    script.on(CANDIDATE, method, died(), when=lambda: script.confirmed)
    script.ends(Outcome.SLOWER, "not attributed: candidate: the process")


# -- results ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["make_ready", "turn", "proofs"])
@pytest.mark.parametrize("side", SIDES)
def test_a_wrong_result_accuses_the_candidate_alone(side: str, method: str) -> None:
    script = Script("a", "b")
    script.on(side, method, wrong(), "a")
    outcome = Outcome.NOT_JUDGED if side == BASE else Outcome.WRONG_RESULT
    script.ends(outcome, f"{side}: WrongResultError: a-eager: y", all_verdicts=True)


@pytest.mark.parametrize("of", ["an op", "what is not timed", "a training step"])
@pytest.mark.parametrize("by", ["its own reference", "the base's reference", None])
def test_a_candidate_that_fixes_a_wrong_base_is_new_if_the_bases_reference_calls_it_right(
    by: str | None, of: str
) -> None:
    script = Script("a", "b")
    script.untimed = {"a": "its kernels are interpreted"} if of == "what is not timed" else {}
    if of == "a training step":
        if by == "the base's reference":
            pytest.skip("a step is held to the reference of its own side")
        script.factories = {"a"}
    script.on(BASE, "verify", wrong(), "a")
    if by == "its own reference":
        script.on(CANDIDATE, "verify", wrong(), "a")
    if by == "the base's reference":
        script.on(BASE, "reference", {"y": proof(exact=(9.0,) * 8)}, "a")
    if by is not None:
        script.ends(Outcome.WRONG_RESULT, "candidate: ", all_verdicts=True)
        return
    assert script.run()["a"].outcome is Outcome.NEW
    assert script.status == 0
    assert "the base's result is wrong; the candidate's is right" in script.verdicts[0].text


# -- times ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, None, "1"])
@pytest.mark.parametrize("side", SIDES)
def test_an_invalid_time_is_missing(side: str, seconds: Any) -> None:
    script = Script("a", "b")
    script.on(side, "turn", {**SECONDS, HOST: seconds}, "a")
    script.ends(Outcome.MISSING, HOST)


@pytest.mark.parametrize("metrics", [[], [DEVICE], [HOST], [DEVICE, HOST, "more"]], ids=str)
@pytest.mark.parametrize("launch", [None, 4], ids=["always", "once"])
@pytest.mark.parametrize("side", SIDES)
def test_a_turn_without_every_metric_and_no_other_is_missing(
    side: str, launch: int | None, metrics: list[str]
) -> None:
    script = Script("a", "b")
    script.on(side, "turn", dict.fromkeys(metrics, 1.0), "a", launch=launch)
    script.ends(Outcome.MISSING, f"a turn of the {side} gave")


# -- the device -------------------------------------------------------------------------------


def test_a_device_that_others_use_in_every_block_is_busy() -> None:
    script = Script("a", "b")
    script.watch = Watching(*["another process"] * 3)
    script.ends(Outcome.BUSY, "another process", name="device")
    for name in "ab":
        assert settled(script, name).text == "not measured: another process"


def test_a_device_that_is_busy_while_confirming_leaves_nothing_green() -> None:
    script = Script()
    script.slower("a", device_seconds=1.05)
    watch = script.watch
    watch.during = lambda pids: "throttled" if script.confirming else None  # type: ignore[method-assign]
    script.run()
    assert not any(verdict.outcome.green for verdict in script.verdicts)
    assert script.status == 14
