"""Several pairs prepare benchmarks at the same time, and one at a time is timed."""

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest

from correctness_tests.support.gate_fakes import (
    REGISTERED,
    SIDES,
    Script,
    ScriptedPair,
    Watching,
    died,
    outcomes,
    wrong,
)
from tinyllama.harness.gate import pool as module
from tinyllama.harness.gate import waves
from tinyllama.harness.gate.listing import Stopped
from tinyllama.harness.gate.pair import BASE, CANDIDATE, MOST
from tinyllama.harness.gate.pool import pairs_at_once
from tinyllama.harness.gate.turns import Block
from tinyllama.harness.records.verdict import Outcome

NAMES = "abcdefg"
TIMED = ("turn", "paced", "layouts")


class AtWork:
    """Counts the workers that are asked something at the same time."""

    def __init__(self) -> None:
        self.lock, self.now, self.most = threading.Lock(), 0, 0

    def asked(self, answer: Any = None, seconds: float = 0.005) -> Callable[[str], Any]:
        def ask(name: str) -> Any:
            with self.lock:
                self.now += 1
                self.most = max(self.most, self.now)
            time.sleep(seconds)
            with self.lock:
                self.now -= 1
            return answer

        return ask


def test_the_verdicts_are_those_of_one_pair() -> None:
    found = []
    for count in (1, 3):
        script = Script(*NAMES)
        script.slower("a", device_seconds=1.05)
        script.on(CANDIDATE, "verify", wrong("b"), "b")
        script.on(BASE, "expect", died(), "c", launch=None)
        script.counts("d", kernels=1)
        script.alike("e")
        script.names[CANDIDATE].append("h")
        found.append(outcomes(script.run(at_once=count)))
    assert found[0] == found[1]
    assert set(found[0].values()) > {Outcome.SLOWER, Outcome.WRONG_RESULT, Outcome.WORKER_DIED}


def test_nothing_else_is_asked_while_one_is_timed() -> None:
    script, work = Script(*NAMES), AtWork()
    overlapping = []

    def timed(name: str) -> dict[str, float]:
        if work.now:
            overlapping.append(name)
        return dict.fromkeys(script.slowdowns[BASE], 1e-5)

    for side in SIDES:
        for method in ("begin", "inputs", "compiled", "end"):
            script.on(side, method, work.asked([]))
        script.on(side, "expect", work.asked())
        script.on(side, "turn", timed)
    script.run(at_once=3)
    assert not overlapping
    assert work.most > 2, "more than the two sides of one pair were asked at once"


def test_each_pair_compiles_apart_and_blocks_find_what_all_compiled(tmp_path: Path) -> None:
    script = Script(*NAMES)
    trees = {side: replace(tree, caches=tmp_path / side) for side, tree in sides(script).items()}

    def compiled(side: str) -> Callable[[str], None]:
        def into(folder: str) -> None:
            (Path(folder) / "triton_cache_dir").mkdir(parents=True)
            (Path(folder) / "triton_cache_dir" / Path(folder).name).touch()

        return into

    for side in SIDES:
        script.on(side, "use_caches", compiled(side))
    script.run(at_once=3, base=trees[BASE], candidate=trees[CANDIDATE])
    for side in SIDES:
        kept = {path.name for path in (tmp_path / side / "triton_cache_dir").iterdir()}
        assert kept == {f"{side}-0", f"{side}-1", f"{side}-2"}


def test_workers_that_take_the_place_of_others_compile_apart_too(tmp_path: Path) -> None:
    script = Script()
    both = [replace(tree, caches=tmp_path / side) for side, tree in sides(script).items()]
    pair = ScriptedPair(script, both, script.device, REGISTERED)
    pair.compile_apart("2")
    pair.restart()
    assert [tree.caches.name for tree in pair.trees.values()] == [f"{side}-2" for side in SIDES]


def test_processes_of_all_pairs_are_known_to_the_watch() -> None:
    script = Script(*NAMES)
    script.run(at_once=4)
    assert {len(set(pids)) for pids in script.watch.pids} == {8}


def test_what_a_discarded_block_said_first_is_measured_again() -> None:
    script = Script("a")
    script.bars = {(side, "a"): {"transposed": 2.0} for side in SIDES}
    layouts = Mock(return_value={})
    script.on(CANDIDATE, "layouts", layouts)
    script.watch = Watching("another process")
    assert script.run()["a"].outcome is Outcome.MISSING, "no ratio was given"
    assert layouts.mock_calls == [call("a"), call("a")]
    paced = [
        launch for launch, side, method, _ in script.asked if (side, method) == (BASE, "paced")
    ]
    assert set(paced) == {2, 3}


@pytest.mark.parametrize(("processors", "count"), [(2, 1), (module.PROCESSORS, 2), (64, MOST)])
def test_few_processors_prepare_one_benchmark_at_a_time(
    monkeypatch: pytest.MonkeyPatch, processors: int, count: int
) -> None:
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda pid: set(range(processors)))
    assert pairs_at_once(module.torch.device("cpu")) == count


def sides(script: Script) -> dict[str, Any]:
    setting = script.setting()
    return {BASE: setting.base, CANDIDATE: setting.candidate}


@pytest.mark.parametrize(("count", "at_once", "blocks"), [(3, 2, 2), (4, 4, 4), (5, 2, 2)])
def test_waves_on_a_disturbed_device_are_discarded_and_the_third_is_the_last(
    count: int, at_once: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def disturbed(run: Any, which: Any, number: int) -> Any:
        asked.append(number)
        return SimpleNamespace(take=lambda: "another process", blocks=[{}] * number)

    monkeypatch.setattr(waves, "_Wave", disturbed)
    say = Mock()
    run: Any = SimpleNamespace(
        setting=SimpleNamespace(at_once=at_once, say=say), disturbed=0, discarded=0
    )
    for number in (1, 2):
        assert waves.wave(run, [], count, Mock()) == 0
        assert (run.disturbed, run.discarded) == (number, number * blocks)
    with pytest.raises(Stopped) as stopped:
        waves.wave(run, [], count, Mock())
    assert stopped.value.verdict.outcome is Outcome.BUSY
    assert asked == [blocks] * 3
    assert say.mock_calls == [call(f"blocks are discarded ({blocks}): another process")] * 3


def test_a_wave_adds_its_blocks_to_what_had_no_error_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    which: list[Any] = [
        SimpleNamespace(name=name, verdict=None, figures=["before"], paces={}) for name in "abc"
    ]

    def timed(number: int, name: str) -> Any:
        layouts: list[Any] = [f"layout {number}"] if name == "a" else []
        return waves.Timed(Block({"s": number}, {"s": 10 + number}), {BASE: number}, layouts)

    blocks = [{name: timed(number, name) for name in "abc"} for number in (1, 2)]

    def taken(*given: Any) -> Any:
        def take() -> None:
            which[1].verdict = "an error"

        return SimpleNamespace(take=take, blocks=blocks)

    monkeypatch.setattr(waves, "_Wave", taken)
    series = {name: SimpleNamespace(statistics=[], again=[], excesses=[]) for name in "abc"}
    run: Any = SimpleNamespace(
        setting=SimpleNamespace(at_once=2),
        series=lambda one, metric: series[one.name],
        errors_as_verdict=lambda one: nullcontext(),
    )
    assert waves.wave(run, which, 2, lambda one: one.statistics) == 2
    assert (
        series["a"]
        == series["c"]
        == SimpleNamespace(statistics=[1, 2], again=[], excesses=[11, 12])
    )
    assert series["b"].statistics == []
    assert which[0].figures == ["before", "layout 1", "layout 2"]
    assert which[0].paces == {BASE: 2}
    which[1].verdict = None
    waves.wave(run, which, 2, lambda one: one.again)
    assert series["c"] == SimpleNamespace(statistics=[1, 2], again=[1, 2], excesses=[11, 12])
