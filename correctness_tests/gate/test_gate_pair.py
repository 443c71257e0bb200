"""Two processes, one of each side: what a block measures in them, and how they fail."""

import os
import sys
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pytest

from correctness_tests.support.commands import ROOT
from correctness_tests.support.gate_fakes import (
    CPU,
    REGISTERED,
    SIDES,
    Script,
    ScriptedPair,
)
from tinyllama.bench import gated
from tinyllama.harness.gate import pair as module
from tinyllama.harness.gate import schedule
from tinyllama.harness.gate.benchmarks import Benchmark
from tinyllama.harness.gate.metric import DEVICE, HOST
from tinyllama.harness.gate.pair import BASE, CANDIDATE, Pair, SideError, Tree
from tinyllama.harness.gate.schedule import PairPool, opened, timing_processor


@pytest.fixture
def trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Tree]:
    """Folders of two sides that run what is in `broken_sides`, which needs nothing ahead."""
    monkeypatch.setattr(module, "FACTORY", "correctness_tests.support.broken_sides:Broken")
    monkeypatch.setattr(module, "_IMPORTED_LATE", ())
    monkeypatch.setattr(schedule, "PRELOAD", ())
    found = []
    for side in SIDES:
        (tmp_path / side).mkdir()
        found.append(tree(side, tmp_path / side))
    return found


def tree(side: str, root: Path, python: str | None = None) -> Tree:
    return Tree(side, root, python or sys.executable, side, root / "caches")


def block(pair: Pair, name: str) -> dict[str, float]:
    return timed(pair, Benchmark(name, None, "", {DEVICE: 0.1}), dict.fromkeys(SIDES), 4)


def timed(pair: Pair, benchmark: Benchmark, proofs: dict[str, Any], pairs: int) -> dict[str, float]:
    pair.make_ready(benchmark, proofs, 0.0)
    found = pair.take(benchmark, pairs, {})
    pair.hold_results(benchmark)
    pair.end(benchmark)
    return dict(found.statistics)


def failed(pair: Pair) -> bool:
    return pair.failed


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# -- a block ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("forked")
def test_a_block_is_the_median_of_logarithms_in_two_processes_that_end_with_it(
    trees: list[Tree],
) -> None:
    with opened(trees, CPU, REGISTERED) as (pair,):
        assert pair.each("identity") == {one.name: str(one.root) for one in trees}
        assert block(pair, "a") == {DEVICE: pytest.approx(log(1.1))}
        pids = pair.pids()
        assert len({*pids, os.getpid()}) == 3
        with pytest.raises(SideError, match="base: WrongResultError: y: error 1") as error:
            block(pair, "make_ready is wrong")
        assert error.value.wrong
        pair.workers[BASE].drop("side")
        with pytest.raises(SideError, match="base: KeyError") as error:
            block(pair, "a")
        assert not error.value.wrong
    assert not any(map(alive, pids))


@pytest.mark.usefixtures("forked")
def test_the_tree_against_itself_has_equal_inputs_and_about_equal_times(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the sides that are gated, on one op of the tree."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    both = [replace(tree(side, ROOT), caches=tmp_path / side) for side in SIDES]
    with opened(both, CPU, gated.REGISTERED) as (pair,):
        who = pair.each("identity")
        assert who[BASE] == who[CANDIDATE]
        assert who[BASE]["root"] == str(ROOT)
        listed = pair.each("benchmarks")
        assert listed[BASE] == listed[CANDIDATE]
        one = next(each for each in listed[BASE] if each.name.startswith("silu_mul-torch"))
        assert all(0 < seconds < 60 for seconds in pair.begin(one).values())
        inputs = pair.each("inputs", one.name)
        assert inputs[BASE] == inputs[CANDIDATE]
        proofs = pair.verify(one)
        assert proofs[BASE] == proofs[CANDIDATE]
        pair.end(one)
        (statistic,) = timed(pair, one, proofs, 10).values()
        assert abs(statistic) < 1


@pytest.mark.usefixtures("forked")
def test_turns_are_held_to_one_processor_and_nothing_else_is(trees: list[Tree]) -> None:
    processor = timing_processor(CPU)
    free = [os.sched_getaffinity(0)] * 2
    with opened(trees, CPU, REGISTERED) as (pair,):
        pair.processor = processor
        for _ in range(2):
            block(pair, "a")
            seen = dict.fromkeys(("begin", "make_ready", "proofs", "end"), free)
            seen["turn"] = [{processor}] * 2
            assert pair.each("seen") == dict.fromkeys(SIDES, seen)
            pair.restart()
        pair.processor = None
        block(pair, "a")
        assert pair.each("seen")[BASE]["turn"] == free
        pair.processor = processor
        with pytest.raises(ValueError, match="a turn of the"):
            timed(pair, Benchmark("a", None, "", {HOST: 0.1}), dict.fromkeys(SIDES), 4)
        pair.each("end", "a")
        assert pair.each("seen")[CANDIDATE]["end"] == free, "and not after what went wrong"


@pytest.mark.long
def test_what_starts_meanwhile_keeps_off_the_processor_that_is_timed(trees: list[Tree]) -> None:
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one processor")
    ahead = PairPool(max(before), 1)
    try:
        for beside in (before, before - {max(before)}):  # the second pair is started ahead
            with ahead(trees, CPU, REGISTERED) as (pair,):
                pair.each("begin", "a", ())
                assert pair.each("seen")[BASE]["begin"] == [beside] * 2
        assert os.sched_getaffinity(0) == before
    finally:
        ahead.close()


# -- processes that fail ----------------------------------------------------------------------


@pytest.mark.long
def test_a_process_that_dies_or_hangs_is_said_and_others_take_the_place_of_both(
    trees: list[Tree],
) -> None:
    with opened(trees, CPU, REGISTERED) as (pair,):
        pair.leading = CANDIDATE  # so that the base has the turn that does not count, ahead of all
        with pytest.raises(SideError, match=r"base: the process .* ended with status 9") as error:
            block(pair, "turn dies")
        assert error.value.side == BASE
        assert not error.value.wrong
        assert "a last word" in error.value.details
        assert failed(pair)
        pair.restart()
        before, started = pair.pids(), pair.each("started")
        assert started[BASE] == started[CANDIDATE], "the hashes of texts, and the threads of torch"
        assert started[BASE][1] == "1"
        pair.restart()
        assert pair.each("started")[BASE][0] != started[BASE][0], "in each launch another one"
        assert not failed(pair)
        assert not any(map(alive, before))
        assert block(pair, "a") == {DEVICE: pytest.approx(log(1.1))}
        hangs = "candidate: candidate did not answer call in 0 s"  # that of who is asked first
        with pytest.raises(SideError, match=hangs):
            pair.each("turn", "turn hangs", 1, None, timeout=0.3)
        assert failed(pair)


@pytest.mark.long
def test_a_base_that_does_not_import_is_an_error_of_the_base(trees: list[Tree]) -> None:
    package = trees[0].root / "tinyllama"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('this base is broken')\n")
    with pytest.raises(SideError, match="base: ") as error, opened(trees, CPU, REGISTERED):
        pytest.fail("it opened")
    assert "this base is broken" in error.value.details


def test_an_interpreter_that_cannot_be_started_is_an_error_of_its_side(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("no interpreter")
    for python in (script, tmp_path / "nowhere"):
        pair = Pair([tree(BASE, tmp_path, str(python)), tree(CANDIDATE, tmp_path)], CPU, REGISTERED)
        assert not pair.workers, "nobody waits for the other side"
        with pytest.raises(SideError, match="base: base cannot be started"):
            pair.open()
        assert pair.failed


# -- pairs that are started ahead -------------------------------------------------------------


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> tuple[PairPool, Script]:
    script = Script()
    monkeypatch.setattr(schedule, "Pair", lambda *args: ScriptedPair(script, *args))
    return PairPool(0, 2), script


def events(script: Script) -> list[tuple[int, str]]:
    """Of the base: which launch started, was made and closed, in order."""
    shown = ("start", "make", "kill", "close")
    return [
        (at, method) for at, side, method, _ in script.asked if side == BASE and method in shown
    ]


def test_a_comparison_with_pairs_started_ahead_is_the_same(ahead: tuple[PairPool, Script]) -> None:
    opener, script = ahead
    script.slower("a", device_seconds=1.05)
    assert script.run(pairs=opener)["a"].outcome.title == "SLOWER"
    opener.close()
    each = {at for at, _ in events(script)}
    assert {at for at, method in events(script) if method == "close"} == each
