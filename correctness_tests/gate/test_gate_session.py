"""A comparison from its first process to its verdicts, on sides that answer from a script."""

import itertools
import json
import math
import re
import threading
import time
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from correctness_tests.support.gate_fakes import (
    CPU,
    GPU,
    SECONDS,
    SIDES,
    Script,
    Watching,
    died,
    history,
    outcomes,
    proof,
    wrong,
)
from tinyllama.harness.gate.benchmarks import BASE, CANDIDATE
from tinyllama.harness.gate.metric import ALL_WORK, DEVICE, HOST
from tinyllama.harness.gate.pair import Effort
from tinyllama.harness.gate.sequential_test import CONFIRM_BLOCKS, LOOKS
from tinyllama.harness.gate.session import MAX_DISCARDED
from tinyllama.harness.machine.worker import WorkerError
from tinyllama.harness.records.verdict import Outcome

INTERVAL = r"\+\d\.\d\d% \[\+(\d\.\d\d)%, \+(\d\.\d\d)%\] in \d+ blocks"
FULL = WorkerError("the device's memory is full", types=["torch.OutOfMemoryError"])


def noisy(script: Script, name: str, spread: float) -> None:
    """The candidate's times of a benchmark differ by so much from turn to turn."""
    random = np.random.default_rng(0)

    def turn(_: str) -> dict[str, float]:
        factor = math.exp(random.normal(0.0, spread))
        return {m: SECONDS[m] * factor for m in script.slowdowns[CANDIDATE]}

    script.on(CANDIDATE, "turn", turn, name)


def asked_of(script: Script, method: str) -> list[str]:
    """The benchmarks of which a method was asked, in order."""
    return list(dict.fromkeys(args[0] for _, _, m, args in script.requests if m == method))


def counts(script: Script) -> dict[str, set[int]]:
    """By benchmark, how many blocks its metrics have."""
    return {
        name: {len(series.statistics) for series in state.series.values()}
        for name, state in script.session.compared.items()
    }


# -- by time --------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
@pytest.mark.parametrize("draw", range(3))
def test_equal_sides_are_the_same(device: torch.device, draw: int) -> None:
    script = Script("a", "b", device=device, seed=draw)
    assert outcomes(script.run()) == {"a": Outcome.SAME, "b": Outcome.SAME}
    assert script.status == 0


@pytest.mark.parametrize("draw", range(3))
def test_a_slowdown_of_3_percent_is_slower_by_name_with_interval_and_kernels(draw: int) -> None:
    script = Script("a", "b", seed=draw)
    script.slower("a", device_seconds=1.03)
    verdicts = script.run()
    assert outcomes(verdicts) == {"a": Outcome.SLOWER, "b": Outcome.SAME}
    assert script.status == 10
    text = verdicts["a"].text
    said = re.search(rf"device_seconds {INTERVAL}, confirmed by \+\d\.\d\d% in fresh", text)
    assert said, text
    assert 0.5 < float(said[1]) < 3 < float(said[2])
    assert "host_seconds" in text, "what is not slower is said too"
    assert "a_kernel: a call of 5.0 us -> a call of 5.2 us" in text.splitlines()[1]
    assert "fill" not in text, "it did not move"


def test_a_large_slowdown_ends_at_the_first_look_and_is_confirmed_by_as_many_blocks() -> None:
    """Of 3 times, on a noisy device that nothing is known of."""
    script = Script(noise=0.1, device=CPU)
    script.slower("a", device_seconds=3.0)
    script.ends(Outcome.SLOWER, f"in {LOOKS[0]} blocks, confirmed by ")
    assert script.launches == 1 + 2 * LOOKS[0] + 1


def test_a_faster_benchmark_is_green_and_named() -> None:
    script = Script()
    script.slower("a", device_seconds=0.95)
    assert re.search(r"device_seconds -(5\.|4\.9)", script.ends(Outcome.FASTER).text)


def test_a_slowdown_between_margin_and_tolerance_is_slower_if_sure_at_once() -> None:
    """Of 1%, over the margin of 0.5% and under the tolerance of 2%."""
    script = Script(noise=2e-4)
    script.slower("a", device_seconds=1.01)
    assert script.run()["a"].outcome is Outcome.SAME, "sure to be under the tolerance"
    assert script.run(noise=history("a", spread=2e-4))["a"].outcome is Outcome.SLOWER
    script.slower("a", device_seconds=1.003)
    assert script.run(noise=history("a", spread=2e-4))["a"].outcome is Outcome.SAME, "in the margin"


@pytest.mark.parametrize("draw", range(3))
def test_a_noisy_benchmark_is_inconclusive_after_all_blocks(draw: int) -> None:
    script = Script(noise=0.3, seed=draw)
    said = f"in {LOOKS[-1]} blocks, neither certainly under 2.0% nor over 0.5%"
    assert not script.ends(Outcome.INCONCLUSIVE, said).outcome.green
    assert script.launches == 1 + LOOKS[-1]


def test_a_slowdown_that_fresh_processes_do_not_confirm_is_inconclusive() -> None:
    script = Script("a", "b")
    script.slower("a", device_seconds=1.05)
    script.on(CANDIDATE, "turn", SECONDS, "a", when=lambda: script.confirming)
    noisy(script, "b", 0.2)
    verdicts = script.run()
    assert verdicts["a"].outcome is Outcome.INCONCLUSIVE
    assert f"not confirmed: +0.00% in {CONFIRM_BLOCKS} fresh blocks" in verdicts["a"].text
    assert f"in {LOOKS[-1]} blocks" in verdicts["b"].text, "and decides nothing for others"


# -- all work -------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", [DEVICE, HOST])
@pytest.mark.parametrize(("more", "outcome"), [(1.0, Outcome.SAME), (1.15, Outcome.SLOWER)])
def test_work_that_the_figure_does_not_show_is_slower_and_confirmed(
    metric: str, more: float, outcome: Outcome
) -> None:
    """On another stream, in a destructor, in the first call, in every fifth."""
    script = Script("a", "b", noise=1e-4)
    script.hidden("a", **{metric: more})
    text = script.ends(outcome).text
    assert f"{metric} " in text
    said = rf"{ALL_WORK}{metric} \+1.\.\d\d% \[at least .*, confirmed by \+1"
    assert bool(re.search(said, text)) is (more > 1)


@pytest.mark.parametrize("share", [0.05, 0.2])
def test_a_share_of_slow_turns_is_work_too(share: float) -> None:
    """Their median is the same."""
    script, turns = Script("a", noise=0.0), itertools.count(1)

    def turn(name: str) -> dict[str, float]:
        slow = 1.9 if next(turns) % round(1 / share) == 0 else 1.0
        return {metric: seconds * slow for metric, seconds in SECONDS.items()}

    script.on(CANDIDATE, "turn", turn)
    verdict = script.run(effort=Effort(pairs=20, repeated=20, first=0.0))["a"]
    assert verdict.outcome is Outcome.SLOWER
    assert "device_seconds +0.00%" in verdict.text


@pytest.mark.parametrize(("seconds", "outcome"), [(4.9, Outcome.SAME), (5.1, Outcome.SLOWER)])
def test_the_first_call_in_a_fresh_process_has_a_bar(seconds: float, outcome: Outcome) -> None:
    """From warm caches: 1.5 times and half a second."""
    script = Script()
    script.on(CANDIDATE, "begin", seconds, when=lambda: script.launches > 1)
    text = script.ends(outcome).text
    assert ("first_call_seconds 3.00 -> 5.10 s, allowed 5.00" in text) is (seconds > 5)


@pytest.mark.parametrize(
    ("again", "accepted", "is_slower"), [(1.0, 0, False), (9.0, 0, True), (9.0, 6, False)]
)
def test_the_import_of_the_ops_has_a_bar_and_is_measured_twice(
    again: float, accepted: float, is_slower: bool
) -> None:
    script = Script("a")
    if accepted:
        script.accept("import", "compile_seconds", accepted)
    script.identity[BASE]["import_seconds"] = 1.0
    seconds = iter([9.0, again])
    identity_of_script = script._identity

    def identity(worker: Any) -> dict[str, Any]:
        more = {} if worker.tree.name == BASE else {"import_seconds": next(seconds)}
        return {**identity_of_script(worker), **more}

    script._identity = identity  # type: ignore[method-assign]
    slower = {"import": Outcome.SLOWER, "a": Outcome.NOT_DECIDED}
    assert outcomes(script.run()) == (slower if is_slower else {"a": Outcome.SAME})


# -- alternately, in fresh processes --------------------------------------------------------------


def test_a_block_is_a_launch_of_its_own_and_the_sides_take_turns() -> None:
    script = Script("a", "b")
    script.run()
    turns = [(at, side, args[0]) for at, side, method, args in script.requests if method == "turn"]
    assert {launch for launch, _, _ in turns} == set(range(2, script.launches + 1))
    for launch in range(2, script.launches + 1):
        for name in "ab":
            order = [s for at, s, n in turns if (at, n) == (launch, name)]
            a, b = (BASE, CANDIDATE) if launch % 2 == 0 else (CANDIDATE, BASE)
            assert order == [b, a, *[a, b, b, a]], "A B B A; B A A B in the next launch"


def test_a_waiting_worker_is_stopped_and_resumed_after_any_failure() -> None:
    script = Script("a", "b")
    script.on(BASE, "turn", died(), "a", launch=3)
    script.run()
    for launch, side in itertools.product(range(2, script.launches + 1), SIDES):
        stopped = False
        for at, who, method, _ in script.requests:
            if at == launch and who != side and method == "turn":
                assert stopped, "while the other one is timed"
            elif (at, who) == (launch, side):
                assert not (stopped and method in ("begin", "make_ready", "proofs", "end"))
                stopped = method == "stop" or (stopped and method not in ("resume", "turn"))


def test_both_sides_have_the_same_new_values_in_each_pair_of_turns() -> None:
    script = Script("a", noise=2e-4)
    script.run()
    seeds = [(at, side, args[1]) for at, side, method, args in script.requests if method == "turn"]
    seeds_of = {
        (launch, side): sorted(seed for at, of, seed in seeds if (at, of) == (launch, side))
        for launch, side in itertools.product(range(2, script.launches + 1), SIDES)
    }
    assert all(seeds_of[launch, BASE] == seeds_of[launch, CANDIDATE] for launch, _ in seeds_of)
    assert len({seed for some in seeds_of.values() for seed in some}) == LOOKS[0] * 3


def test_the_last_turn_of_a_block_keeps_a_random_call_that_is_held_to_the_bases_reference() -> None:
    script = Script("a", noise=2e-4)
    script.run()
    numbers = [args[2] for _, _, method, args in script.requests if method == "turn"]
    in_a_block = 2 * 3
    for place, number in enumerate(numbers):
        assert (number is None) is (place % in_a_block < in_a_block - 2)
    chosen = [number for number in numbers if number is not None]
    assert chosen[::2] == chosen[1::2], "the same call of both sides"
    assert len(set(chosen)) == LOOKS[0]


@pytest.mark.parametrize("when", ["before", "in a block"])
@pytest.mark.parametrize("what", ["projections", "strides"])
def test_a_result_unlike_the_bases_is_wrong_though_its_own_side_calls_it_right(
    what: str, when: str
) -> None:
    proofs = {
        "projections": proof(projections=(1.4,) * 8, exact=(1.4,) * 8),
        "strides": proof(strides=(1, 4), reference_strides=(1, 4), dense=False),
    }
    script = Script("a", "b")
    launch = None if when == "before" else 3
    script.on(CANDIDATE, "verify" if launch is None else "proofs", {"y": proofs[what]}, "a",
              launch=launch)  # fmt: skip
    script.ends(Outcome.WRONG_RESULT, "candidate: y", all_verdicts=True)


# -- a machine that others use --------------------------------------------------------------------


def test_disturbed_blocks_are_taken_again_and_nothing_of_them_stays() -> None:
    script = Script()
    script.watch = Watching(*["another process"] * MAX_DISCARDED)
    assert script.run()["a"].outcome is Outcome.SAME
    assert "blocks are discarded (1): another process" in script.said
    assert script.session.report()["discarded"] == MAX_DISCARDED
    assert counts(script) == {"a": {LOOKS[0]}}


def test_the_watch_is_told_which_processes_are_ours() -> None:
    script = Script()
    script.run(at_once=4)
    assert script.watch.pids
    assert all(len(set(pids)) == 4 * len(SIDES) for pids in script.watch.pids)


@pytest.mark.parametrize("side", SIDES)
def test_a_clock_that_disagrees_with_the_judges_is_busy(side: str) -> None:
    script = Script("a")
    script.on(side, "paced", lambda name: time.sleep(0.2))
    verdicts = script.run()
    assert verdicts["a"].outcome is Outcome.BUSY
    assert f"the {side} says" in verdicts["device"].text


@pytest.mark.parametrize("method", ["hold", "wait_until_idle"])
def test_an_unaffected_benchmark_does_not_wait_for_the_device(method: str) -> None:
    script = Script("a", "b")
    script.watch = Watching(**{method: "it is busy"})
    script.alike("a")
    script.on(CANDIDATE, "inputs", 8, "b")
    verdicts = script.run()
    assert verdicts["a"].outcome is Outcome.IDENTICAL
    assert verdicts["b"].outcome is (Outcome.BUSY if method == "hold" else Outcome.NO_BASELINE)


# -- what is identical ----------------------------------------------------------------------------


def test_an_unaffected_benchmark_is_identical_and_does_not_run() -> None:
    script = Script("a", "b")
    script.alike("a")
    script.alike("b")
    assert outcomes(script.run()) == {"a": Outcome.IDENTICAL, "b": Outcome.IDENTICAL}
    assert {method for _, _, method, _ in script.requests} == {
        *("start", "make", "identity", "benchmarks", "declarations", "close")
    }
    assert not script.watch.asked, "nor is the device waited for"


def test_equal_kernels_under_equal_host_code_are_identical_and_not_timed() -> None:
    script = Script()
    script.alike("a", host_only=True)
    script.ends(Outcome.IDENTICAL, "in 1 launches")
    assert script.launches == 1


def test_a_benchmark_without_kernels_is_identical_on_a_busy_cpu_if_only_kernels_differ() -> None:
    script = Script(device=CPU)
    for side in SIDES:
        script.sources[side]["a"] = side, "same"
    script.watch = Watching(hold="it is busy", wait_until_idle="it is busy")
    script.ends(Outcome.IDENTICAL, "no kernel")


@pytest.mark.parametrize("differs", ["host", "code", "nothing is launched"])
def test_equal_kernels_under_other_host_code_are_timed_and_so_are_other_kernels(
    differs: str,
) -> None:
    script = Script()
    script.alike("a", host_only=True)
    if differs == "host":
        script.sources[BASE]["a"] = "whole", "host"
    else:
        for side in SIDES if differs != "code" else (BASE,):
            script.on(side, "compiled", [] if differs != "code" else ["code", "more"], "a")
    assert script.run()["a"].outcome is Outcome.SAME
    assert script.launches > 1


@pytest.mark.parametrize("option", ["toolchains", "measure_all"])
def test_identical_benchmarks_are_timed_on_request(option: str) -> None:
    script = Script("a", "b")
    script.alike("a")
    script.alike("b", host_only=True)
    script.identity[BASE]["python"] = "3.10 /other"
    assert outcomes(script.run(**{option: True})) == {"a": Outcome.SAME, "b": Outcome.SAME}


@pytest.mark.parametrize(
    ("ratio", "noise", "outcome"),
    [
        (1.0, 2e-3, Outcome.IDENTICAL),
        (1.5, 2e-3, Outcome.SLOWER),
        (1.0, 0.3, Outcome.IDENTICAL),
    ],
    ids=["equal", "slower", "inconclusive"],
)
def test_an_audit_times_some_identical_benchmarks(
    ratio: float, noise: float, outcome: Outcome
) -> None:
    """The change reaches them, though no file says so; only a confirmed SLOWER counts."""
    script = Script(*"abcd", noise=noise)
    for name in "abcd":
        script.alike(name)
        script.slower(name, device_seconds=ratio)
    verdicts = script.run(audit=2)
    assert len(asked_of(script, "turn")) == 2
    audited = [verdicts[name] for name in asked_of(script, "turn")]
    assert outcome in {verdict.outcome for verdict in audited}
    assert all("audited: so far" in v.text for v in audited if v.outcome is Outcome.IDENTICAL)
    assert script.status == outcome.status


def test_a_slowdown_prevents_the_audit() -> None:
    script = Script("a", "b")
    script.alike("b")
    script.slower("a", device_seconds=1.3)
    assert outcomes(script.run(audit=1)) == {"a": Outcome.SLOWER, "b": Outcome.IDENTICAL}
    assert asked_of(script, "turn") == ["a"]


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("new", [True, False])
def test_a_benchmark_that_cannot_be_timed_is_verified_and_named(right: bool, new: bool) -> None:
    script = Script("a", "b")
    script.untimed = {"a": "on a CPU its kernels are interpreted"}
    if new:
        script.names[BASE].remove("a")
    if not right:
        script.on(CANDIDATE, "verify", wrong(), "a")
    green = Outcome.NEW if new else Outcome.SAME
    verdicts = script.run(all_verdicts=True)
    assert verdicts["a"].outcome is (green if right else Outcome.WRONG_RESULT)
    assert ("its kernels are interpreted" in verdicts["a"].text) is right
    assert asked_of(script, "turn") == ["b"]


# -- what is timed first, and what ends the comparison --------------------------------------------


def test_a_slower_benchmark_leaves_undecided_ones_not_decided() -> None:
    script = Script("a", "b", "c")
    script.slower("a", device_seconds=1.05)
    noisy(script, "b", 0.05)
    verdicts = script.run()
    assert outcomes(verdicts) == {"a": Outcome.SLOWER, "b": Outcome.NOT_DECIDED, "c": Outcome.SAME}
    assert script.status == 10
    assert verdicts["b"].text.startswith(
        "a is SLOWER, which decides the merge; so far device_seconds"
    )


def test_a_missing_benchmark_decides_a_merge_before_anything_is_prepared() -> None:
    script = Script("a", "b")
    script.names[BASE].append("gone")
    verdicts = script.run()
    assert outcomes(verdicts) == {
        "gone": Outcome.MISSING,
        **dict.fromkeys("ab", Outcome.NOT_DECIDED),
    }
    assert script.status == 15
    assert not asked_of(script, "begin")


def test_an_op_whose_own_file_differs_decides_a_merge_before_others_are_prepared() -> None:
    script = Script(*"bcade")
    script.names[CANDIDATE].append("new")
    script.edited_ops = {"a"}
    script.alike("e")
    script.slower("a", device_seconds=1.05)
    verdicts = script.run()
    assert outcomes(verdicts) == {
        "a": Outcome.SLOWER,
        **dict.fromkeys("bcd", Outcome.NOT_DECIDED),
        "e": Outcome.IDENTICAL,
        "new": Outcome.NOT_DECIDED,
    }
    assert verdicts["b"].text == "a is SLOWER, which decides the merge; it was not measured"
    assert asked_of(script, "begin") == asked_of(script, "turn") == ["a"]


@pytest.mark.parametrize("at_once", [1, 3])
def test_other_benchmarks_are_prepared_if_the_edited_ops_decide_nothing(at_once: int) -> None:
    script = Script(*"bcade", noise=2e-4)
    script.names[CANDIDATE].append("new")
    script.edited_ops = {"a"}
    script.alike("e")
    script.slower("d", device_seconds=1.05)
    verdicts = script.run(at_once=at_once)
    assert outcomes(verdicts) == {
        **dict.fromkeys("abc", Outcome.SAME),
        "d": Outcome.SLOWER,
        "e": Outcome.IDENTICAL,
        "new": Outcome.NEW,
    }
    assert next(name for name in asked_of(script, "turn") if name != "new") == "a"
    verified = [args[0] for _, _, method, args in script.requests if method == "verify"]
    assert sorted({*verified}) == [*"abcd", "new"]
    assert max(map(verified.count, "abcd")) == 2 * verified.count("new"), "once a side"


@pytest.mark.parametrize(("edited", "compared"), [(set(), {"b"}), ({"a"}, {"a", "b"})])
def test_further_cases_are_compared_where_an_own_file_of_the_op_differs(
    edited: set[str], compared: set[str]
) -> None:
    script = Script("a", "b", noise=2e-4)
    script.further, script.edited_ops = {"a"}, edited
    assert set(outcomes(script.run())) == compared
    script.names[CANDIDATE].remove("a")
    assert script.run()["a"].outcome is Outcome.MISSING


# -- several pairs at once ------------------------------------------------------------------------


def test_the_verdicts_are_those_of_one_pair_and_one_is_timed_at_a_time() -> None:
    verdicts, lock, working, overlapping = [], threading.Lock(), [0], list[str]()

    def work(name: str) -> float:
        with lock:
            working[0] += 1
        time.sleep(0.002)
        with lock:
            working[0] -= 1
        return 3.0

    def turn(name: str) -> dict[str, float]:
        overlapping.extend([name] * working[0])
        return {m: SECONDS[m] * (1.05 if name == "a" else 1.0) for m in SECONDS}

    for at_once in (1, 3):
        script = Script(*"abcdefg")
        for side in SIDES:
            script.on(side, "begin", work)
        script.on(CANDIDATE, "turn", turn)
        script.on(CANDIDATE, "verify", wrong("b"), "b")
        script.on(BASE, "make_ready", died(), "c")
        script.counts("d", kernels=1)
        script.alike("e")
        script.names[CANDIDATE].append("h")
        verdicts.append(outcomes(script.run(at_once=at_once, all_verdicts=True)))
    assert verdicts[0] == verdicts[1]
    assert set(verdicts[0].values()) > {Outcome.SLOWER, Outcome.WRONG_RESULT, Outcome.NOT_JUDGED}
    assert not overlapping


def holders(script: Script) -> set[int]:
    """The launches whose candidate holds the memory of a benchmark."""
    holding = set()
    for launch, side, method, _ in list(script.requests):
        if side == CANDIDATE and method == "begin":
            holding.add(launch)
        elif side == CANDIDATE and method in ("end", "close", "kill"):
            holding.discard(launch)
    return holding


@pytest.mark.parametrize("method", ["verify", "make_ready", "turn", "proofs"])
@pytest.mark.parametrize("alone", [False, True])
def test_a_benchmark_out_of_memory_beside_others_is_measured_alone(
    method: str, alone: bool
) -> None:
    """A process holds the memory of a benchmark from its beginning until it has ended it."""
    script = Script(*"abc", noise=2e-4)
    full = Mock(side_effect=FULL)
    script.on(CANDIDATE, method, full, "b", when=lambda: alone or len(holders(script)) > 1)
    verdicts = script.run(at_once=4)
    expected = Outcome.NOT_JUDGED if alone else Outcome.SAME
    assert outcomes(verdicts) == {"a": Outcome.SAME, "b": expected, "c": Outcome.SAME}


# -- the report -----------------------------------------------------------------------------------


def test_the_report_holds_every_figure_of_every_block() -> None:
    script = Script("a", "b")
    script.slower("a", device_seconds=1.05)
    script.alike("b")
    script.names[BASE].append("gone")
    verdicts = script.run(all_verdicts=True)
    report = json.loads(json.dumps(script.session.report(), allow_nan=False))
    assert report["others"] == [str(verdicts["gone"])]
    assert report["affected"] == {"a": "f.py differs"}
    for name, benchmark in report["benchmarks"].items():
        assert benchmark["outcome"] == verdicts[name].outcome.title
    slower = report["benchmarks"]["a"]
    assert len(slower["blocks"][DEVICE]) == len(slower["all_work"][DEVICE])
    assert len(slower["confirmation"][DEVICE]) == CONFIRM_BLOCKS
    assert [*report["seconds"]] == ["prepare", "time", "confirm", "attribute"]
