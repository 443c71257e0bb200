"""A comparison from its first process to its verdicts, on sides that answer from a script."""

import itertools
import json
import re
import time
from dataclasses import replace
from itertools import pairwise
from math import exp

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
)
from tinyllama.harness.gate import waves
from tinyllama.harness.gate.attribution import PROFILES
from tinyllama.harness.gate.decision import CONFIRM_BLOCKS, LOOKS
from tinyllama.harness.gate.pair import BASE, CANDIDATE
from tinyllama.harness.gate.subject import DEVICE, HOST
from tinyllama.harness.machine.worker import WorkerError
from tinyllama.harness.records.verdict import Outcome

INTERVAL = r"\+\d\.\d\d% \[\+(\d\.\d\d)%, \+(\d\.\d\d)%\] in \d+ blocks"


# -- by time ----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
@pytest.mark.parametrize("draw", range(5))
def test_equal_sides_are_the_same(device: torch.device, draw: int) -> None:
    script = Script("a", "b", device=device, seed=draw)
    assert outcomes(script.run()) == {"a": Outcome.SAME, "b": Outcome.SAME}
    assert script.status == 0


@pytest.mark.parametrize("draw", range(5))
def test_a_slowdown_of_3_percent_is_slower_by_name_with_interval_and_kernels(draw: int) -> None:
    script = Script("a", "b", seed=draw)
    script.slower("a", device_seconds=1.03)
    found = script.run()
    assert outcomes(found) == {"a": Outcome.SLOWER, "b": Outcome.SAME}
    assert script.status == 10
    text = found["a"].text
    said = re.search(rf"device_seconds {INTERVAL}, confirmed by \+\d\.\d\d% in fresh", text)
    assert said, text
    assert 0.5 < float(said[1]) < 3 < float(said[2])
    assert "host_seconds" in text, "what is not slower is said too"
    assert "a_kernel: 5.0 us in 1 -> 5.2 us in 1" in text.splitlines()[1]
    assert "fill" not in text, "it did not move"
    assert "confirmed" not in found["b"].text


def test_faster_is_green_and_said() -> None:
    script = Script()
    script.slower("a", device_seconds=0.95)
    assert re.search(r"device_seconds -(5\.|4\.9)", script.ends(Outcome.FASTER).text)


def test_between_margin_and_tolerance_it_is_slower_where_that_is_sure_at_once() -> None:
    """Of 1%, over the margin of 0.5% and under the tolerance of 2%."""
    script = Script(noise=2e-4)
    script.slower("a", device_seconds=1.01)
    assert script.run()["a"].outcome is Outcome.SAME, "sure to be under the tolerance"
    assert script.run(noise=history("a", spread=2e-4))["a"].outcome is Outcome.SLOWER
    script.slower("a", device_seconds=1.003)
    assert script.run(noise=history("a", spread=2e-4))["a"].outcome is Outcome.SAME, "in the margin"


@pytest.mark.parametrize("draw", range(5))
def test_what_is_too_noisy_is_inconclusive_after_all_blocks(draw: int) -> None:
    script = Script(noise=0.3, seed=draw)
    said = f"in {LOOKS[-1]} blocks, neither certainly under 2.0% nor over 0.5%"
    assert not script.ends(Outcome.INCONCLUSIVE, said).outcome.green
    assert script.launches == 1 + LOOKS[-1]


def test_a_slowdown_that_fresh_processes_do_not_confirm_is_inconclusive() -> None:
    script = Script()
    script.slower("a", device_seconds=1.05)
    script.on(CANDIDATE, "turn", SECONDS, when=lambda: script.confirming)
    script.ends(Outcome.INCONCLUSIVE, f"not confirmed: +0.00% in {CONFIRM_BLOCKS} fresh blocks")


# -- alternately, in fresh processes ----------------------------------------------------------


def test_a_block_is_a_launch_of_its_own_and_the_sides_take_turns() -> None:
    script = Script("a", "b")
    script.run()
    turns = [
        (launch, side, args[0]) for launch, side, method, args in script.asked if method == "turn"
    ]
    assert {launch for launch, _, _ in turns} == set(range(2, script.launches + 1))
    for launch in range(2, script.launches + 1):
        for name in "ab":
            order = [s for at, s, n in turns if (at, n) == (launch, name)]
            a, b = (BASE, CANDIDATE) if launch % 2 == 0 else (CANDIDATE, BASE)
            assert order == [b, a, *[a, b, b, a]], "A B B A; B A A B in the next launch"


def test_a_statistic_is_over_turns_both_ways_and_not_over_pairs() -> None:
    """Of these six the median is -0.05, and that of the means of two after two is +0.05."""
    logs = [0.3, -0.1, 0.3, -0.2, 0.0, -0.2]
    script = Script("a", noise=0.0)
    turns = itertools.cycle([0.0, *logs])

    def turn(name: str) -> dict[str, float]:
        return dict.fromkeys(script.slowdowns[CANDIDATE], exp(next(turns)))

    script.on(CANDIDATE, "turn", turn)
    script.on(BASE, "turn", dict.fromkeys(script.slowdowns[BASE], 1.0))
    script.run(effort=replace(script.effort, pairs=6, repeated=6))
    for series in script.session.found["a"].series.values():
        assert series.statistics == pytest.approx([0.05] * len(series.statistics))


def test_in_their_turns_and_only_then_both_sides_are_held_to_one_processor() -> None:
    script = Script("a", "b")
    script.on(BASE, "turn", WorkerError("it died"), "a", launch=2)
    script.run(processor=5)
    for launch in range(1, script.launches + 1):
        held = None  # as a process begins
        turns = 0
        for at, side, method, args in script.asked:
            if (at, side) != (launch, CANDIDATE):
                continue
            if method == "pin":
                held = args[0]
            elif method in ("begin", "expect", "turn", "end"):
                assert held == (5 if method == "turn" else None), (launch, method)
                turns += method == "turn"
        # the first compiles; in the second the other side died in its turn after this one's
        assert (turns == 1) == (launch == 2)
        assert (turns > 0) == (launch > 1)


def test_what_a_process_keeps_of_its_first_product_is_there_before_bytes_are_counted() -> None:
    script = Script("a", "b")
    script.on(BASE, "verify", died(), "a", launch=1)
    script.run()
    for launch, side in itertools.product((1, 2), SIDES):  # both prepare: the first one failed
        asked = [what for which, who, what, _ in script.asked if (which, who) == (launch, side)]
        assert asked.index("warm_up_blas") < asked.index("begin")
    assert "warm_up_blas" not in {what for launch, _, what, _ in script.asked if launch > 2}


def test_each_side_is_held_to_its_own_results() -> None:
    script = Script()
    script.run()
    proofs = {(s, args[1][0]["y"]) for _, s, method, args in script.asked if method == "expect"}
    assert {(side, proof.digest) for side, proof in proofs} == {(side, len(side)) for side in SIDES}


def test_no_benchmark_stays_in_memory_while_another_is_asked() -> None:
    script = Script(*"abcd")
    script.alike("a", host_only=True)
    script.on(BASE, "inputs", 8, "b")
    script.run()
    for side in SIDES:
        kept = [m for _, s, m, _ in script.asked if s == side and m in ("begin", "end", "close")]
        assert not any(one == after == "begin" for one, after in pairwise(kept))


def test_disturbed_blocks_are_taken_again() -> None:
    script = Script()
    disturbed = waves.MAX_DISCARDED
    script.watch = Watching(None, *["another process"] * disturbed)
    assert script.run()["a"].outcome is Outcome.SAME
    assert "blocks are discarded (1): another process" in script.said
    report = script.session.report()
    taken = report["benchmarks"]["a"]["blocks"][DEVICE]
    assert script.launches == 1 + disturbed + len(taken)
    assert (report["blocks"], report["discarded"]) == (disturbed + len(taken), disturbed)


# -- what is identical ------------------------------------------------------------------------


def test_equal_sources_are_identical_and_nothing_of_them_runs() -> None:
    script = Script("a", "b")
    script.alike("a")
    script.alike("b")
    assert outcomes(script.run()) == {"a": Outcome.IDENTICAL, "b": Outcome.IDENTICAL}
    assert script.status == 0
    assert {method for _, _, method, _ in script.asked} == {
        *("start", "make", "identity", "left_out", "benchmarks", "declarations", "close")
    }


def test_equal_code_and_host_are_identical_and_not_timed() -> None:
    script = Script()
    script.alike("a", host_only=True)
    script.ends(Outcome.IDENTICAL, "in 1 launches")
    assert script.launches == 1


@pytest.mark.parametrize("differs", ["host", "code"])
def test_equal_code_under_another_host_is_timed_and_so_is_other_code(differs: str) -> None:
    script = Script()
    script.alike("a", host_only=True)
    if differs == "host":
        script.sources[BASE]["a"] = "whole", "host"
    else:
        script.on(BASE, "compiled", ["code", "more code"], "a")
    assert script.run()["a"].outcome is Outcome.SAME
    assert script.launches > 1


@pytest.mark.parametrize("option", ["toolchains", "measure_all"])
def test_what_is_identical_is_timed_where_that_is_asked_for(option: str) -> None:
    script = Script("a", "b")
    script.alike("a")
    script.alike("b", host_only=True)
    script.identity[BASE]["python"] = "3.10 /other"
    assert outcomes(script.run(**{option: True})) == {"a": Outcome.SAME, "b": Outcome.SAME}


@pytest.mark.parametrize(
    ("metric", "said"), [(DEVICE, "a_kernel"), (HOST, "kernels are launched as often as before")]
)
def test_what_kernels_take_explains_device_time_alone(metric: str, said: str) -> None:
    script = Script("a")
    script.slower("a", **{metric: 1.3})
    for side, took in ((BASE, 5e-6), (CANDIDATE, 6.5e-6)):
        profile = {"kernels": {"a_kernel": (1, took)}, "resources": {}}
        script.on(side, "profiles", [profile] * PROFILES)
    verdict = script.ends(Outcome.SLOWER)
    assert verdict.text.splitlines()[1].strip().startswith(said)


# -- the report -------------------------------------------------------------------------------


def test_the_report_holds_all_that_was_measured() -> None:
    script = Script("a", "b", "c")
    script.slower("a", device_seconds=1.05)
    script.alike("b")
    script.names[BASE].append("gone")
    found = script.run()
    report = json.loads(json.dumps(script.session.report(), allow_nan=False))
    assert (report["base"], report["candidate"]) == ("the base", "the candidate")
    assert report["versions"] == {"torch": "3.1", "triton": "4.2"}
    assert report["others"] == [str(found["gone"])]
    assert report["benchmarks"].keys() == {"a", "b", "c"}
    for name, one in report["benchmarks"].items():
        assert (one["outcome"], one["text"]) == (found[name].outcome.title, found[name].text)
        assert len(one["figures"]) == len(found[name].figures)
    slower = report["benchmarks"]["a"]
    assert len(slower["blocks"][DEVICE]) in LOOKS
    assert len(slower["confirmation"][DEVICE]) == CONFIRM_BLOCKS
    assert slower["moved"]
    figures = {figure["metric"]: figure for figure in slower["figures"]}
    assert figures["kernels"]["before"] == figures["kernels"]["after"] == 3
    assert figures[DEVICE]["ratio"] == pytest.approx(1.05, abs=0.01)
    assert report["benchmarks"]["b"]["blocks"] == {}
    assert report["blocks"] == len(slower["blocks"][DEVICE]) + CONFIRM_BLOCKS
    assert report["discarded"] == 0


def test_the_report_says_how_long_each_stage_and_each_benchmark_took() -> None:
    script = Script()
    for method in ("inputs", "expect"):
        script.on(BASE, method, lambda name: time.sleep(0.02))
        script.on(CANDIDATE, method, None)
    script.run()
    report = script.session.report()
    seconds, took = report["seconds"], report["benchmarks"]["a"]["seconds"]
    stages = [name for name in seconds if ": " not in name]
    assert stages == ["trees", "prepare", "time", "confirm", "attribute"]
    parts = ("start processes", "compare results", "make ready", "turns")
    assert sum(seconds[f"time: {part}"] for part in parts) <= seconds["time"]
    assert 0.02 <= took["prepare"] <= seconds["prepare"]
    assert script.session.launches * 0.02 <= took["make ready"]
    assert took["make ready"] + took["time"] <= seconds["time"]
    stopped = Script()
    stopped.on(BASE, "make", died())
    stopped.run()
    assert "prepare" in stopped.session.report()["seconds"]
