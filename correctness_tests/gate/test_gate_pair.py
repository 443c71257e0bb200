"""Two processes, one of each side: what a block measures in them, and how they fail."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import log
from pathlib import Path
from typing import Any

import pytest

from correctness_tests.support.gate_fakes import (
    CPU,
    REGISTERED,
    SIDES,
    Script,
    ScriptedPair,
)
from tinyllama.harness.gate import pair as module
from tinyllama.harness.gate import schedule
from tinyllama.harness.gate.benchmarks import Benchmark
from tinyllama.harness.gate.metric import DEVICE, HOST
from tinyllama.harness.gate.pair import BASE, CANDIDATE, Pair, SideError, Tree
from tinyllama.harness.gate.schedule import PairPool, timing_processor


@pytest.fixture
def trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Tree]:
    """Folders of two sides that run what is in `broken_sides`, which needs nothing ahead."""
    monkeypatch.setattr(module, "FACTORY", "correctness_tests.support.broken_sides:Broken")
    monkeypatch.setattr(module, "_IMPORTED_LATE", ())
    monkeypatch.setattr(schedule, "PRELOAD", ())
    trees_of_sides = []
    for side in SIDES:
        (tmp_path / side).mkdir()
        trees_of_sides.append(tree(side, tmp_path / side))
    return trees_of_sides


def tree(side: str, root: Path, python: str | None = None) -> Tree:
    return Tree(side, root, python or sys.executable, side, root / "caches", REGISTERED)


@contextmanager
def opened(trees: list[Tree]) -> Iterator[list[Pair]]:
    with PairPool(0, ahead=0) as pool, pool.pairs(trees, CPU) as pairs:
        yield pairs


def block(pair: Pair, name: str) -> dict[str, float]:
    return timed(pair, Benchmark(name, None, "", {DEVICE: 0.1}), dict.fromkeys(SIDES), 4)


def timed(pair: Pair, benchmark: Benchmark, proofs: dict[str, Any], pairs: int) -> dict[str, float]:
    pair.make_ready(benchmark, proofs, 0.0)
    block_of_pair = pair.take(benchmark, pairs, {})
    pair.hold_results(benchmark)
    pair.end(benchmark)
    return dict(block_of_pair.statistics)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.usefixtures("forked")
def test_a_block_is_the_median_of_logarithms_in_two_processes_that_end_with_it(
    trees: list[Tree],
) -> None:
    with opened(trees) as (pair,):
        assert pair.ask_both("identity") == {
            side_tree.name: str(side_tree.root) for side_tree in trees
        }
        assert block(pair, "a") == {DEVICE: pytest.approx(log(1.1))}
        pids = pair.pids()
        assert len({*pids, os.getpid()}) == 3
        with pytest.raises(SideError, match="base: WrongResultError: y: error 1") as error:
            block(pair, "make_ready is wrong")
        assert error.value.wrong
    assert not any(map(alive, pids))


@pytest.mark.usefixtures("forked")
def test_turns_are_held_to_one_processor_and_nothing_else_is(trees: list[Tree]) -> None:
    processor, free = timing_processor(CPU), [os.sched_getaffinity(0)] * 2
    with opened(trees) as (pair,):
        pair.processor = processor
        block(pair, "a")
        processors = dict.fromkeys(("begin", "make_ready", "proofs", "end"), free)
        expected = {**processors, "turn": [{processor}] * 2}
        assert pair.ask_both("seen") == {side: expected for side in SIDES}
        with pytest.raises(ValueError, match="a turn of the"):
            timed(pair, Benchmark("a", None, "", {HOST: 0.1}), dict.fromkeys(SIDES), 4)
        pair.ask_both("end", "a")
        assert pair.ask_both("seen")[CANDIDATE]["end"] == free, "nor after what went wrong"


@pytest.mark.long
def test_a_process_that_dies_or_hangs_is_said_and_others_take_the_place_of_both(
    trees: list[Tree],
) -> None:
    with opened(trees) as (pair,):
        pair.leading = CANDIDATE  # so that the base has the turn that does not count, ahead of all
        with pytest.raises(SideError, match=r"base: the process .* ended with status 9") as error:
            block(pair, "turn dies")
        assert error.value.side == BASE
        assert "a last word" in error.value.details
        before = pair.pids()
        pair.restart()
        started = pair.ask_both("started")
        assert started[BASE] == started[CANDIDATE], "the hashes of texts, and the threads of torch"
        assert not any(map(alive, before))
        assert block(pair, "a") == {DEVICE: pytest.approx(log(1.1))}
        hangs = "candidate: candidate did not answer call in 0 s"  # that of who is asked first
        with pytest.raises(SideError, match=hangs):
            pair.ask_both("turn", "turn hangs", 1, None, timeout=0.3)


@pytest.mark.long
@pytest.mark.parametrize("how", ["broken", "no interpreter"])
def test_a_side_that_cannot_start_is_an_error_of_its_own(trees: list[Tree], how: str) -> None:
    if how == "broken":
        package = trees[0].root / "tinyllama"
        package.mkdir()
        (package / "__init__.py").write_text("raise RuntimeError('this base is broken')\n")
    else:
        trees[0] = tree(BASE, trees[0].root, str(trees[0].root / "nowhere"))
    with pytest.raises(SideError, match="base: ") as error, opened(trees):
        pytest.fail("it opened")
    assert "this base is broken" in error.value.details or how != "broken"


def test_a_comparison_with_pairs_started_ahead_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = Script()
    monkeypatch.setattr(schedule, "Pair", lambda *args: ScriptedPair(script, *args))
    script.slower("a", device_seconds=1.05)
    with PairPool(0, ahead=2) as pool:
        verdicts = script.run(pairs=pool.pairs)
    assert verdicts["a"].outcome.title == "SLOWER"
    started, closed = (
        {(at, side) for at, side, method, _ in script.requests if method == what}
        for what in ("start", "close")
    )
    assert started == closed
