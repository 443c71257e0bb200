"""Two processes, one of each side: what a block measures in them, and how they fail."""

import contextlib
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import log
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from correctness_tests.support.commands import ROOT
from correctness_tests.support.gate_fakes import (
    CPU,
    REGISTERED,
    SIDES,
    Script,
    ScriptedPair,
    ScriptedWorker,
    wrong,
)
from tinyllama.bench import gated
from tinyllama.harness.gate import pair as module
from tinyllama.harness.gate import pool
from tinyllama.harness.gate.pair import BASE, CANDIDATE, Effort, Pair, SideError, Tree
from tinyllama.harness.gate.pool import PairPool, opened, timing_processor
from tinyllama.harness.gate.side import Benchmark
from tinyllama.harness.gate.subject import DEVICE, HOST
from tinyllama.harness.machine.worker import WorkerError


@pytest.fixture
def trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Tree]:
    """Folders of two sides that run what is in `broken_sides`, which needs nothing ahead."""
    monkeypatch.setattr(module, "FACTORY", "correctness_tests.support.broken_sides:Broken")
    monkeypatch.setattr(module, "_MODULE", "correctness_tests.support.broken_sides")
    monkeypatch.setattr(module, "_IMPORTED_LATE", ())
    monkeypatch.setattr(PairPool, "PRELOAD", ())
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
    return pair.compared(benchmark, pair.take(benchmark, pairs, {}), alike=False).statistics


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
            block(pair, "expect is wrong")
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
        proofs = {side: pair.ask(side, "verify", one.name) for side in SIDES}
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
            seen = {"begin": free, "expect": free, "turn": [{processor}] * 2, "hold": free}
            seen["end"] = free
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


def test_gates_on_two_gpus_are_held_to_two_processors_and_to_the_first_only_where_it_is_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "identity", lambda device: f"GPU-{device.index}")
    monkeypatch.setattr(os, "sched_getaffinity", {0: {4, *range(8, 64)}}.__getitem__)
    gpus = [torch.device("cuda", number) for number in range(8)]
    chosen = [timing_processor(gpu) for gpu in gpus]
    assert chosen == [timing_processor(gpu) for gpu in gpus]
    assert set(chosen) <= set(range(8, 64))
    assert len(set(chosen)) >= 6
    monkeypatch.setattr(os, "sched_getaffinity", {0: {7}}.__getitem__)
    assert timing_processor(CPU) == 7


def test_this_process_alone_is_kept_off_a_processor_and_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = {0: {1, 2, 3}, 1: {1, 2}}
    monkeypatch.setattr(os, "sched_getaffinity", held.__getitem__)
    monkeypatch.setattr(os, "sched_setaffinity", held.__setitem__)
    with contextlib.suppress(KeyError), pool._without(2):
        assert held == {0: {1, 3}, 1: {1, 2}}
        raise KeyError("a process that does not start")
    assert held == {0: {1, 2, 3}, 1: {1, 2}}


def test_what_starts_meanwhile_keeps_off_the_processor_that_is_timed(trees: list[Tree]) -> None:
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one processor")
    ahead = PairPool(max(before), 1)
    try:
        for beside in (before, before - {max(before)}):  # the second pair is started ahead
            with ahead(trees, CPU, REGISTERED) as (pair,):
                pair.each("begin", "a")
                assert pair.each("seen")[BASE]["begin"] == [beside] * 2
        assert os.sched_getaffinity(0) == before
    finally:
        ahead.close()


def test_pairs_that_start_ahead_are_opened_while_others_prepare(
    trees: list[Tree], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "make_side", make := Mock(wraps=module.make_side))
    ahead = PairPool(max(os.sched_getaffinity(0)), 1)
    try:
        with ahead(trees, CPU, REGISTERED), ahead.opening():
            (following,) = ahead._next
            asked = following.workers[BASE].pid
        assert following.is_open
        with ahead(trees, CPU, REGISTERED) as (pair,):
            assert pair is following
            assert pair.pids()[0] == asked
            made = [one.args[0] for one in make.call_args_list]
            assert all(made.count(one) == 1 for one in pair.workers.values())
            pair.each("begin", "a")
    finally:
        ahead.close()


def test_what_fails_to_open_ahead_is_said_when_it_is_asked_for(trees: list[Tree]) -> None:
    ahead = PairPool(max(os.sched_getaffinity(0)), 1)
    try:
        with ahead(trees, CPU, REGISTERED):
            ahead._next[0].workers[CANDIDATE].kill()
            with ahead.opening():
                pass
        with pytest.raises(SideError, match="candidate"), ahead(trees, CPU, REGISTERED):
            pytest.fail("it opened")
    finally:
        ahead.close()


# -- processes that fail ----------------------------------------------------------------------


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
        before = pair.pids()
        assert failed(pair)
        pair.restart()
        assert not failed(pair)
        assert not any(map(alive, before))
        assert block(pair, "a") == {DEVICE: pytest.approx(log(1.1))}
        hangs = "candidate: candidate did not answer call in 0 s"  # that of who is asked first
        with pytest.raises(SideError, match=hangs):
            pair.each("turn", "turn hangs", 1, timeout=0.3)
        assert failed(pair)


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


@pytest.mark.parametrize(
    ("metrics", "pairs"), [((DEVICE,), 10), ((HOST,), 24), ((DEVICE, HOST), 24)]
)
def test_host_time_takes_more_turns(metrics: tuple[str, ...], pairs: int) -> None:
    benchmark = Benchmark("a", None, "", dict.fromkeys(metrics, 0.1))
    assert Effort(pairs=10, repeated=24, first=0.0).of(benchmark) == pairs


def test_blocks_repeat_as_when_error_rates_were_certified() -> None:
    """The rates of docs/GATE.md are of blocks of this length."""
    assert Effort.on(CPU) == Effort(pairs=20, repeated=20, first=0.3)
    assert Effort.on(torch.device("cuda", 0)) == Effort(pairs=10, repeated=20, first=0.5)


# -- pairs that are started ahead -------------------------------------------------------------


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> tuple[PairPool, Script]:
    script = Script()
    monkeypatch.setattr(pool, "Pair", lambda *args: ScriptedPair(script, *args))
    return PairPool(0, 2), script


def events(script: Script) -> list[tuple[int, str]]:
    """Of the base: which launch started, was made and closed, in order."""
    shown = ("start", "make", "kill", "close")
    return [
        (at, method) for at, side, method, _ in script.asked if side == BASE and method in shown
    ]


def test_the_next_pairs_are_started_while_one_is_used_and_asked_nothing(
    ahead: tuple[PairPool, Script],
) -> None:
    opener, script = ahead
    setting = script.setting()
    for number in (1, 2):
        with opener((setting.base, setting.candidate), CPU, REGISTERED) as (pair,):
            assert pair.preload == ((), PairPool.PRELOAD)[number > 1]
            begun = [at for at, what in events(script) if what == "start"]
            assert begun == [*range(1, number + opener.pairs + 1)]
    opener.close()
    started = [event for event in events(script) if event[1] not in ("close", "kill")]
    assert started == [
        *((1, "start"), (2, "start"), (3, "start"), (1, "make")),
        *((4, "start"), (2, "make")),
    ]
    ended = {how: [at for at, done in events(script) if done == how] for how in ("kill", "close")}
    assert ended == {"kill": [3, 4], "close": [1, 2, 3, 4]}, "nobody waits for what was not used"


def test_a_pair_ends_while_the_next_one_begins_and_before_that_ends(
    ahead: tuple[PairPool, Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    opener, script = ahead
    setting = script.setting()
    sides = (setting.base, setting.candidate)
    begun = threading.Event()
    close = pool.close_pairs

    def late(pairs: Sequence[Pair]) -> None:
        assert begun.wait(20)
        close(pairs)

    monkeypatch.setattr(pool, "close_pairs", late)
    with opener(sides, CPU, REGISTERED):
        pass
    with opener(sides, CPU, REGISTERED):
        assert (1, "close") not in events(script)
        begun.set()
    assert (1, "close") in events(script)
    opener.close()


def test_an_error_closes_the_pair_that_was_used(ahead: tuple[PairPool, Script]) -> None:
    opener, script = ahead
    setting = script.setting()
    with pytest.raises(KeyError) as error:  # noqa: SIM117
        with opener((setting.base, setting.candidate), CPU, REGISTERED):
            raise KeyError
    assert error.traceback, "which holds the frames"
    opener.close()
    assert [at for at, method in events(script) if method == "close"] == [1, 2, 3]


def test_a_comparison_with_pairs_started_ahead_is_the_same(ahead: tuple[PairPool, Script]) -> None:
    opener, script = ahead
    script.slower("a", device_seconds=1.05)
    assert script.run(pairs=opener)["a"].outcome.title == "SLOWER"
    opener.close()
    each = {at for at, _ in events(script)}
    assert {at for at, method in events(script) if method == "close"} == each


def test_a_machine_with_few_processors_starts_nothing_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for processors in (1, 2, pool.PROCESSORS - 1):
        monkeypatch.setattr(os, "sched_getaffinity", {0: set(range(processors))}.__getitem__)
        with pool.launcher(0) as opener:
            assert opener is opened
    for processors, pairs in ((pool.PROCESSORS, 2), (16, 4), (128, 4)):
        monkeypatch.setattr(os, "sched_getaffinity", {0: set(range(processors))}.__getitem__)
        with ExitStack() as stack:
            opener = stack.enter_context(pool.launcher(0))
            assert isinstance(opener, PairPool)
            assert opener.pairs == pairs


def test_only_what_the_check_raised_is_a_wrong_result() -> None:
    """Whatever the message says."""
    assert SideError(BASE, wrong()).wrong
    assert not SideError(BASE, WorkerError("WrongResultError: y")).wrong
    assert not SideError(BASE, WorkerError("y", types=["other.WrongResultError"])).wrong


def test_workers_hash_alike_import_ahead_and_have_one_thread_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The order of a set must not differ between the sides. The first backward pass imports for a
    second. Idle threads of one side slow the other."""
    trees = [tree(side, tmp_path) for side in SIDES]
    worker = Mock(side_effect=lambda *_, **options: ScriptedWorker(Script(), trees[0], 1))
    monkeypatch.setattr(module, "Worker", worker)
    monkeypatch.setattr(os, "sched_getaffinity", {0: set(range(16))}.__getitem__)
    Pair(trees, CPU, REGISTERED, ["more"])
    Pair(trees, torch.device("cuda"), REGISTERED, ["more"])
    seen = [one.kwargs for one in worker.call_args_list]
    late = {"torch.fx.experimental.symbolic_shapes", "ops", "more"}
    assert all(late <= set(options["preload"]) for options in seen)
    threads = [options["env"].get("OMP_NUM_THREADS") for options in seen]
    assert threads == ["1", "1", "2", "2"], "of sixteen processors, for four pairs"
    seeds = [options["env"]["PYTHONHASHSEED"] for options in seen]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
    assert all(int(options["env"]["MALLOC_TRIM_THRESHOLD_"]) >= 2**30 for options in seen)


def test_the_sides_take_turns_as_a_b_b_a() -> None:
    idle = {side: SimpleNamespace(worked=lambda: 1.0) for side in SIDES}
    turned: Any = SimpleNamespace(order=(*SIDES,), _turn=Mock(return_value={}), workers=idle)
    turned.device = torch.device("cpu")
    taken = Pair._turns(turned, None, 4, {})  # type: ignore[arg-type]
    warm = [CANDIDATE, BASE]
    took = [one.args[0] for one in turned._turn.call_args_list]
    assert took == [*warm, *(BASE, CANDIDATE, CANDIDATE, BASE) * 2]
    assert len(set(taken.seeds)) == 4
    assert [len(each) for each in taken.took.values()] == [4, 4]


def test_a_side_that_ends_while_the_other_is_timed_is_said() -> None:
    gone = Mock(worked=Mock(side_effect=WorkerError("it ended")))
    turned: Any = SimpleNamespace(order=(*SIDES,), _turn=Mock(return_value={}), failed=False)
    turned.workers = {BASE: SimpleNamespace(worked=lambda: 0.0), CANDIDATE: gone}
    with pytest.raises(SideError, match="candidate: it ended"):
        Pair._turns(turned, None, 4, {})  # type: ignore[arg-type]
    assert turned.failed


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("own", [True, False])
def test_a_side_that_works_while_the_other_is_timed_gives_no_time(
    side: str, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a thread: it makes the other one slower, or does what its own calls had left."""
    clock, passed = dict.fromkeys(SIDES, 5.0), [0.0]
    watch = SimpleNamespace(monotonic=lambda: passed[0])
    monkeypatch.setattr("tinyllama.harness.gate.pair.time", watch)

    def turn(name: str, *_: object) -> dict[str, float]:
        passed[0] += 0.02 if name == side else 0.01
        clock[side] += 0.003 * ((name == side) == own)
        return {}

    workers = {name: SimpleNamespace(worked=lambda name=name: clock[name]) for name in SIDES}
    turned: Any = SimpleNamespace(order=(*SIDES,), _turn=turn, workers=workers)
    with (
        contextlib.nullcontext()
        if own
        else pytest.raises(ValueError, match=f"the {side} worked for 0.012 s of the 0.04 s in")
    ):
        Pair._turns(turned, None, 4, {})  # type: ignore[arg-type]
