"""Several pairs prepare benchmarks at the same time, and one at a time is timed."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest

from correctness_tests.support.gate_fakes import (
    SIDES,
    Script,
    Watching,
    died,
    outcomes,
    wrong,
)
from tinyllama.harness.gate.pair import BASE, CANDIDATE
from tinyllama.harness.records.verdict import Outcome

NAMES = "abcdefg"


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


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
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


def sides(script: Script) -> dict[str, Any]:
    setting = script.setting()
    return {BASE: setting.base, CANDIDATE: setting.candidate}
