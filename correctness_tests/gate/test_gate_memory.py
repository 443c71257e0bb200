"""What is prepared, and what is ready at the same time, fits into the device's memory."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any
from unittest.mock import Mock

import pytest

from correctness_tests.support.gate_fakes import SIDES, Script, died, outcomes
from tinyllama.harness.gate import run
from tinyllama.harness.gate.pair import BASE, CANDIDATE
from tinyllama.harness.machine.worker import WorkerError
from tinyllama.harness.records.verdict import Outcome

FULL = WorkerError("the device's memory is full", types=["torch.OutOfMemoryError"])


@pytest.mark.parametrize("method", ["expect", "turn", "hold"])
def test_what_finds_no_memory_beside_others_is_measured_alone(method: str) -> None:
    script = Script(*"abc", noise=2e-4)
    without_memory = Mock(side_effect=FULL)
    script.on(CANDIDATE, method, without_memory, "b", when=lambda: not without_memory.called)
    found = script.run(at_once=4)
    without_memory.assert_called_once_with("b")
    assert set(outcomes(found).values()) == {Outcome.SAME}
    for one in script.session.found.values():
        assert {len(series.statistics) for series in one.series.values()} == {4}


def test_what_finds_no_memory_alone_is_told_so() -> None:
    script = Script(*"abc", noise=2e-4)
    script.on(CANDIDATE, "expect", FULL, "b")
    found = script.run(at_once=4)
    assert outcomes(found) == {"a": Outcome.SAME, "b": Outcome.WORKER_DIED, "c": Outcome.SAME}


@pytest.mark.parametrize("method", ["expect", "turn", "hold"])
def test_a_process_that_ends_takes_no_other_benchmark_with_it(method: str) -> None:
    script = Script(*"abcd", noise=2e-4)
    dead = set[tuple[int, str]]()  # of which worker

    def dies(name: str) -> Any:
        dead.update((at, side) for at, side, m, args in script.asked[-1:])
        raise died()

    for side in SIDES:
        for what in ("expect", "turn", "notes", "hold", "end"):
            script.on(side, what, died(), when=lambda: script.asked[-1][:2] in dead)
    script.on(BASE, method, dies, "b")
    found = script.run(at_once=4)
    assert dead
    assert outcomes(found) == {**dict.fromkeys("acd", Outcome.SAME), "b": Outcome.WORKER_DIED}
    counts = Counter(
        len(series.statistics)
        for one in script.session.found.values()
        for series in one.series.values()
        if one.name != "b"
    )
    assert set(counts) == {4}


@pytest.mark.long
def test_nothing_is_made_ready_before_the_results_of_the_last_are_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "bytes_of", lambda device: 8e9)  # of two in one batch
    script, comparing, overlapping = Script(*"abcd", noise=2e-4), [0], list[str]()

    def hold(name: str) -> None:
        comparing[0] += 1
        time.sleep(0.02)
        comparing[0] -= 1

    def begin(name: str) -> float:
        if comparing[0]:
            overlapping.append(name)
        return 3.0

    for side in SIDES:
        script.on(side, "hold", hold)
        script.on(side, "begin", begin)
    script.run(at_once=4)
    assert not overlapping
