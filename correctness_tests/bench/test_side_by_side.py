"""Contenders are made side by side where that disturbs nothing, and checked one at a time."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tinyllama.bench import longest, measure_ops, sweeps
from tinyllama.bench.contender import Contender
from tinyllama.bench.measure import CONTENDERS, FLOOR, Measured, Run, prepare
from tinyllama.bench.measure import prepared as prepared_groups
from tinyllama.bench.peers import AUTOTUNE
from tinyllama.bench.workloads import PROCESSORS, Group, at_once
from tinyllama.harness.machine.worker import WorkerError
from tinyllama.ops import OPS

SMALL, LARGE = Group("small", "bf16"), Group("large", "bf16")
CHECKS = ("memory", "verify")
ANSWERS: dict[str, Any] = {"warm_up": 1.0, "turn": 1.0, "memory": {"peak_bytes": 1}}
ANSWERS["loss_series"] = [*range(20, 0, -1)]
LONG = 0.05  # seconds; what is made at the same time begins well within them


class Watch:
    """Stands in for the workers: what ran, in the order of its beginning, and beside what."""

    def __init__(self, make: Callable[[str], object] = lambda name: time.sleep(LONG)) -> None:
        self.make = make
        self.called: Callable[[str], object] = lambda what: None
        self.began: list[str] = []
        self.beside: dict[str, set[str]] = {}
        self.closed: list[str] = []
        self._now: set[str] = set()
        self._lock = threading.Lock()

    @contextmanager
    def seen(self, what: str) -> Any:
        with self._lock:
            self.began.append(what)
            self.beside[what] = set(self._now)
            for other in self._now:
                self.beside[other].add(what)
            self._now.add(what)
        try:
            yield
        finally:
            with self._lock:
                self._now.discard(what)

    def worker(self, name: str) -> Any:
        return _Watched(self, name)


class _Watched:
    def __init__(self, watch: Watch, name: str) -> None:
        self.watch = watch
        self.name = name
        self.ended = False

    def make(self, key: str, factory: str, *, timeout: float = 0.0, **arguments: Any) -> None:
        with self.watch.seen(f"make {self.name}"):
            self.watch.make(self.name)

    def hang_up(self) -> None:
        pass

    def drop(self, key: str) -> None:
        pass

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.watch.closed.append(self.name)
        self.ended = True

    def call(self, key: str, method: str, *args: Any) -> Any:
        if self.ended:
            raise WorkerError(f"the process of {self.name} ended")
        with self.watch.seen(f"{method} {self.name}"):
            time.sleep(LONG / 10)
            self.watch.called(f"{method} {self.name}")
            return ANSWERS.get(method, {"plan": self.name} if method == "verify" else {})


def contender(name: str, **settings: Any) -> Contender:
    return Contender(name, name, settings.pop("role", "tier"), "nowhere:Nothing", **settings)


def broken_at(broken: str, then: str) -> tuple[Watch, list[list[str]]]:
    """What raises at one call, and the processes that had ended at each of another."""

    def called(now: str) -> None:
        if now == broken:
            raise WorkerError("it broke")
        if now == then:
            ended.append([*watch.closed])

    ended: list[list[str]] = []
    watch = Watch(lambda name: called(f"make {name}"))
    watch.called = called
    return watch, ended


A, B, C, D = (contender(name) for name in "abcd")
SEARCHES = contender("searches", alone=True)


def prepared(
    monkeypatch: pytest.MonkeyPatch,
    watch: Watch,
    *contenders: Contender,
    group: Group = SMALL,
    most: int = 4,
) -> Measured:
    """What is measured of contenders once they are prepared on a machine for so many at once."""
    processors = range(most * PROCESSORS)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(processors))
    workers = {one.name: watch.worker(one.name) for one in contenders}
    run = Run(group, torch.device("cpu"), workers)
    prepare([(run, one) for one in contenders])
    return run.measured


def test_contenders_are_made_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for all the others to be in the making: one by one, none would be made."""
    together = threading.Barrier(4, timeout=10)
    watch = Watch(lambda name: together.wait() and None)
    measured = prepared(monkeypatch, watch, A, B, C, D)
    assert {entry.compiled_beside for entry in measured.entries.values()} == {3}


def test_contenders_of_several_groups_are_made_side_by_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The processes of a group end once it is measured, before the next one is timed."""
    together = threading.Barrier(4, timeout=10)
    watch = Watch(lambda name: together.wait() and None)
    timed: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(4 * PROCESSORS)))
    monkeypatch.setattr(Contender, "worker", lambda one: watch.worker(one.name))
    monkeypatch.setattr(Run, "time", lambda run: timed.append((str(run.group), [*watch.closed])))
    groups = [SMALL, Group("medium", "bf16")]
    only = [((str(group),), "it is of another") for group in groups]
    each = tuple(replace(one, only=only[one in (C, D)]) for one in (A, B, C, D))
    with prepared_groups(groups, torch.device("cpu"), each) as runs:
        found = [run.measure() for run in runs]
    assert timed == [("small-bf16", []), ("medium-bf16", ["a", "b"])]
    assert [list(measured.entries) for measured in found] == [["a", "b"], ["c", "d"]]


@pytest.mark.parametrize("most", [1, 2, 3])
def test_no_more_are_made_at_once_than_processors_allow(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    lot = [contender(f"{number}") for number in range(2 * most)]
    together = threading.Barrier(most, timeout=10)
    making: list[str] = []
    counts: list[int] = []

    def make(name: str) -> None:
        making.append(name)
        counts.append(len(making))
        together.wait()
        time.sleep(LONG)
        making.remove(name)

    measured = prepared(monkeypatch, Watch(make), *lot, most=most)
    assert max(counts) == most
    assert {entry.compiled_beside for entry in measured.entries.values()} == {most - 1}


def test_what_searches_is_made_with_nobody_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch()
    other = replace(SEARCHES, name="other")
    measured = prepared(monkeypatch, watch, SEARCHES, A, other, B)
    assert watch.beside["make searches"] == watch.beside["make other"] == set()
    made = [what for what in watch.began if what.startswith("make")]
    assert made[2:] == ["make searches", "make other"], "after the others"
    assert list(measured.entries) == ["searches", "a", "other", "b"], "in the contenders' order"
    beside = {name: entry.compiled_beside for name, entry in measured.entries.items()}
    assert beside == {"searches": 0, "a": 1, "other": 0, "b": 1}


def test_whoever_times_candidates_while_it_is_made_says_so() -> None:
    searching = [one for one in CONTENDERS if one.arguments.get("mode") == AUTOTUNE]
    assert searching
    assert [one.name for one in CONTENDERS if one.alone] == [
        *(one.name for one in searching),
        FLOOR.name,
    ]


def test_checks_do_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """They fill the device."""
    watch = Watch()
    prepared(monkeypatch, watch, A, B, SEARCHES, C)
    checks = {what for what in watch.began if not what.startswith("make")}
    assert checks == {f"{check} {one}" for one in ("a", "b", "c", "searches") for check in CHECKS}
    assert not any(watch.beside[check] & checks for check in checks), watch.beside
    assert not any(watch.beside[f"{check} searches"] for check in CHECKS), watch.beside


def test_one_is_checked_while_others_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then the last is not ready."""
    checked = threading.Event()
    watch = Watch(lambda name: name != "b" or checked.wait(timeout=10) or pytest.fail("too late"))
    watch.called = lambda what: checked.set() if what == "verify a" else None
    measured = prepared(monkeypatch, watch, A, B)
    assert list(measured.entries) == ["a", "b"]
    assert watch.began.index("verify a") < watch.began.index("memory b")


def test_one_that_fails_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(name: str) -> None:
        time.sleep(
            {"a": 3 * LONG, "b": 2 * LONG, "d": 0.0}.get(name, LONG)
        )  # the last is ready first
        if name in ("b", "c"):
            raise WorkerError(f"{name} does not compile")

    measured = prepared(monkeypatch, Watch(make), A, B, C, D, SEARCHES)
    assert list(measured.entries) == ["a", "d", "searches"]
    assert all(entry.plan == name for name, entry in measured.entries.items())
    found = sorted((name, str(error)) for name, error in measured.failed.items())
    assert found == [("b", "b does not compile"), ("c", "c does not compile")]


@pytest.mark.parametrize("what", ["make", *CHECKS, "warm_up", "turn", "clocks", "loss_series"])
def test_one_that_is_dropped_keeps_no_memory_while_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Its process ends before anything else is asked; the others answer as they did before."""
    watch, ended = broken_at(f"{what} b", f"{what} c")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    run = Run(SMALL, torch.device("cpu"), {one.name: watch.worker(one.name) for one in (A, B, C)})
    prepare([(run, one) for one in (A, B, C)])
    run.time()
    run.look_closer()
    assert ended[0] == ["b"]
    assert list(run.measured.failed) == ["b"]
    assert list(run.measured.seconds) == ["a", "c"]
    assert [entry.plan for entry in run.measured.entries.values()] == ["a", "c"]
    asked = [one for one in watch.began if one.endswith(" b")]
    assert asked[-1] == f"{what} b", "it is asked nothing more"


def test_a_tier_that_does_not_fit_into_a_sweep_keeps_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch, ended = broken_at("verify b", "memory c")
    monkeypatch.setattr(Contender, "worker", lambda one: watch.worker(one.name))
    monkeypatch.setattr(sweeps, "TIERS", (A, B, C))
    found = sweeps._point(sweeps.SWEEPS[0], "seq_len", 2, 8, torch.device("cpu"))
    assert ended == [["b"]]
    assert [(one.contender, one.cannot) for one in found] == [
        *(("a", None), ("b", "it broke"), ("c", None))
    ]


def test_one_that_does_not_grow_keeps_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a process for each length, of which only one failed."""
    failing = iter(["it broke"])
    watch, ended = broken_at("", "verify a")
    monkeypatch.setattr(Contender, "worker", lambda one: watch.worker(one.name))

    def make(name: str) -> None:
        if name == "b" and next(failing, ""):
            raise WorkerError("it broke")

    watch.make = make
    found = longest._grown([B, A], torch.device("cpu"))
    assert [sorted({*closed}) for closed in ended] == [["b"]]
    assert ended[0].count("b") >= len(longest.SHORTER)
    assert str(found["b"]) == "it broke"
    assert found["a"] == [1, 1]


def test_an_op_whose_process_cannot_be_started_fails_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = measure_ops.Bench("fp32", torch.device("cpu"), [OPS["silu_mul"]], ())
    error = WorkerError("torch cannot be started")
    monkeypatch.setattr(measure_ops, "Worker", Mock(side_effect=error))
    bench._guarded(bench.runs[0], "torch", bench._ready)
    assert bench.runs[0].failed == {"torch": error}


@pytest.mark.parametrize("still", [False, True])
def test_one_that_lacks_memory_beside_others_is_made_again_alone(
    still: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a new process; what takes memory only while it is made is over then."""
    lacking = WorkerError("no memory", types=("torch.OutOfMemoryError",))
    made: list[str] = []

    def make(name: str) -> None:
        time.sleep(LONG)
        made.append(name)
        if name in "bd" and (still or made.count(name) == 1):
            raise lacking

    watch = Watch(make)
    monkeypatch.setattr(Contender, "worker", lambda one: watch.worker(one.name))
    measured = prepared(monkeypatch, watch, A, B, C, D)
    assert sorted(made) == [*"abbcdd"]
    assert sorted(watch.closed) == ([*"bbdd"] if still else ["b", "d"])
    assert watch.beside["make b"] == watch.beside["make d"] == set(), "the second time"
    if still:
        assert measured.failed == {"b": lacking, "d": lacking}
    beside = {name: entry.compiled_beside for name, entry in measured.entries.items()}
    assert beside == {"a": 3, "c": 3} if still else {"a": 3, "b": 0, "c": 3, "d": 0}


def test_an_error_of_the_harness_is_none_of_a_contender(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(name: str) -> None:
        if name == "b":
            raise TypeError("the harness is wrong")

    with pytest.raises(TypeError, match="the harness is wrong"):
        prepared(monkeypatch, Watch(make), A, B, C)


@pytest.mark.parametrize(("group", "most"), [(LARGE, 4), (SMALL, 1)], ids=["large", "few cores"])
def test_where_there_is_no_room_each_is_checked_before_the_next_is_made(
    monkeypatch: pytest.MonkeyPatch, group: Group, most: int
) -> None:
    watch = Watch()
    last = contender("floor", role="floor", alone=True)
    measured = prepared(monkeypatch, watch, A, SEARCHES, B, last, group=group, most=most)
    each = [f"{do} {name}" for name in measured.entries for do in ("make", "memory", "verify")]
    assert watch.began == each[:-2], "of the floor there is nothing to check"
    assert [entry.compiled_beside for entry in measured.entries.values()] == [0, 0, 0, None]


@pytest.mark.parametrize(
    ("cores", "expected", "short"), [(1, 1, 1), (2, 1, 1), (7, 1, 3), (8, 2, 4), (16, 4, 8)]
)
def test_how_many_at_once(
    monkeypatch: pytest.MonkeyPatch, cores: int, expected: int, short: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    assert (at_once(SMALL), at_once(SMALL, short=True)) == (expected, short)
    assert at_once(LARGE) == 1, "not all fit beside each other on one card"
