"""What is prepared, and what is ready at the same time, fits into the device's memory."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from correctness_tests.support.gate_fakes import SIDES, Script, died, outcomes
from tinyllama.harness.gate import memory, run
from tinyllama.harness.gate.memory import Memory, exact_bytes, ready_bytes
from tinyllama.harness.gate.pair import BASE, CANDIDATE
from tinyllama.harness.gate.setting import BenchmarkState
from tinyllama.harness.gate.side import Benchmark, declared
from tinyllama.harness.gate.waves import batches
from tinyllama.harness.machine.worker import WorkerError
from tinyllama.harness.records.verdict import Outcome

FULL = WorkerError("the device's memory is full", types=["torch.OutOfMemoryError"])


def test_more_than_all_of_it_waits_until_nothing_is_held() -> None:
    shared, order = Memory(10.0), list[str]()

    def held(name: str, size: float) -> None:
        with shared.held(size):
            order.append(name)

    with shared.held(4.0):
        large = threading.Thread(target=held, args=("large", 50.0), daemon=True)
        large.start()
        time.sleep(0.05)
        small = threading.Thread(target=held, args=("small", 1.0), daemon=True)
        small.start()
        time.sleep(0.05)
        assert order == [], "who asks first is served first, though the small one would fit"
    large.join(5)
    small.join(5)
    assert order == ["large", "small"]


def test_who_waits_is_told_when_another_begins_and_when_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared, told = Memory(10.0), list[float]()
    monkeypatch.setattr(shared._changed, "notify_all", lambda: told.append(shared._held))
    with shared.held(4.0):
        assert told == [4.0]
    assert told == [4.0, 0.0]


def test_what_fits_is_held_at_the_same_time_and_given_back_after_an_error() -> None:
    shared = Memory(10.0)
    with pytest.raises(ValueError, match="broken"), shared.held(10.0):
        raise ValueError("broken")
    with shared.held(5.0), shared.held(5.0):
        assert shared._held == 10.0
    assert shared._held == 0.0


def states(*moved: float, factory: str = "") -> list[BenchmarkState]:
    return [
        BenchmarkState(Benchmark(f"b{n}", None, "m", {}, factory, moved=size))
        for n, size in enumerate(moved)
    ]


def test_pairs_make_ready_what_fits_at_the_same_time() -> None:
    which = states(1e9, 1e9, 1e6, 1e6)
    total = 5 * memory.READY * 1e9  # two sides of two large ones, and not of three
    found = batches(which, 4, total)
    for batch in found:
        assert sum(2 * ready_bytes(one.benchmark) for some in batch for one in some) <= total
    for number in range(4):
        mine = [one.name for batch in found for one in batch[number]]
        assert sorted(mine) == ["b0", "b1", "b2", "b3"], "each pair has each once"
    assert len(found) == 4, "of eight large ones two at a time"


def test_what_does_not_fit_is_ready_alone_and_steps_are_last() -> None:
    large, step = states(1e12), states(0.0, factory="a:step")
    found = batches([*step, *large], 2, 1e9)
    assert found == [[large, []], [[], large], [step, step]]
    assert batches(states(1e6, 1e6), 1, 0.0) == [[[one]] for one in states(1e6, 1e6)]


def test_ops_say_how_many_bytes_their_cases_move() -> None:
    each = declared(torch.device("cpu"), "tinyllama.ops")
    assert each
    assert all(one.moved > 0 for one in each)


@pytest.mark.parametrize(
    ("moved", "ready", "exact"),
    [
        (3e9, 1.2e10, 3e10 + 2**34),
        (1e6, 4e6, 1e8),  # of so little no scores
        (0.0, 4.0 * 2**28, 10.0 * 2**28 + 2**34),
    ],
)
def test_needs_are_multiples_of_what_is_moved(moved: float, ready: float, exact: float) -> None:
    benchmark = Benchmark("x", None, "m", moved=moved)
    assert ready_bytes(benchmark) == ready
    assert ready_bytes(replace(benchmark, layouts={"strided": 1.5})) == 2 * ready
    assert exact_bytes(benchmark) == exact


@pytest.mark.parametrize(
    ("device", "there", "total"), [("cpu", True, 6.0), ("cuda", False, 6.0), ("cuda", True, 7.0)]
)
def test_all_memory_is_the_devices_or_the_hosts(
    device: str, there: bool, total: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = {"SC_PHYS_PAGES": 2, "SC_PAGE_SIZE": 3}
    monkeypatch.setattr(memory.os, "sysconf", pages.__getitem__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    told = Mock(total_memory=7)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: told)
    assert memory.bytes_of(torch.device(device)) == total


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


def test_float64_of_what_fits_is_computed_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    most = {}
    for total in (4e10, 1e12):  # several are prepared in either
        monkeypatch.setattr(run, "bytes_of", lambda device, total=total: total)
        script, now, seen = Script(*"abcdef", noise=2e-4), [0], [0]

        def verify(name: str, now: list[int] = now, seen: list[int] = seen) -> list[Any]:
            now[0] += 1
            seen[0] = max(seen[0], now[0])
            time.sleep(0.05)
            now[0] -= 1
            return []

        for side in SIDES:
            script.on(side, "verify", verify)
        script.run(at_once=4)
        most[total] = seen[0]
    assert most[4e10] == 1
    assert most[1e12] > 1


def test_what_float64_took_once_is_what_it_takes_later() -> None:
    script = Script("a", "b", noise=2e-4)
    for side, most in ((BASE, 3 * 10**9), (CANDIDATE, 2 * 10**9)):
        script.on(side, "most_bytes", most, "a")
    script.run()
    a, b = (script.session.found[name] for name in "ab")
    assert a.exact_bytes == pytest.approx(3.3e9), "of the side that took more, and a tenth"
    assert b.exact_bytes == exact_bytes(b.benchmark), "unknown"


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


def test_inputs_with_gaps_and_other_layouts_take_more() -> None:
    usual, laid_out = (
        Benchmark("x", None, "m", moved=1e9, layouts=bars) for bars in ({}, {"s": 2})
    )
    assert ready_bytes(laid_out) == memory.LAID_OUT * ready_bytes(usual)


def test_what_another_pair_failed_with_does_not_stay_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "bytes_of", lambda device: 1e12)
    script = Script("a", "b", noise=2e-4)
    script.on(BASE, "turn", died(), "a", launch=5)
    script.run(at_once=4)
    for launch in (3, 4, 6):  # of one wave
        asked = [(m, *args[:1]) for at, _, m, args in script.asked if at == launch]
        assert asked.count(("begin", "a")) == asked.count(("end", "a")) == 2, launch


def test_a_pair_that_failed_gives_its_memory_back_before_others_are_made_ready() -> None:
    script = Script("a", "b", "c", noise=2e-4)
    failed: list[int] = []

    def without_memory(name: str) -> Any:
        failed.append(script.asked[-1][0])
        raise FULL

    script.on(CANDIDATE, "expect", without_memory, "b", when=lambda: not failed)
    script.run(at_once=4)
    where = next(n for n, one in enumerate(script.asked) if one[2] == "turn")
    assert (failed[0], CANDIDATE, "close", ()) in script.asked[:where]
