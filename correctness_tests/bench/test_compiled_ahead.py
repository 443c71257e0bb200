"""Cases are prepared some at a time: each compiled one keeps a process, and memory, until it is
measured."""

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from correctness_tests.support.launched import tree_ops
from tinyllama.bench import measure_ops
from tinyllama.bench.measure_ops import CHECKING, Bench, Effort, OpCaseRun, providers_of
from tinyllama.harness.machine.worker import WorkerError
from tinyllama.ops import OPS

CPU = torch.device("cpu")


def test_few_prepared_cases_wait_for_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: set[str] = set()
    measured: list[str] = []
    most = 0

    def prepare(bench: Bench, lot: list[OpCaseRun]) -> None:
        waiting.update(run.op.name for run in lot)

    def one(bench: Bench, run: OpCaseRun) -> None:
        nonlocal most
        most = max(most, len(waiting))
        waiting.remove(run.op.name)
        measured.append(run.op.name)

    monkeypatch.setattr(Bench, "_prepare", prepare)
    monkeypatch.setattr(Bench, "_one", one)
    monkeypatch.setattr(measure_ops, "COMPILING", 3)
    found = Bench("fp32", CPU, tree_ops()).measure()
    assert len(measured) == len(found) == len(tree_ops()) > 3
    assert most == 3


@pytest.mark.parametrize(("gib", "expected"), [(80, 14), (24, 4), (4, 1)])
def test_fewer_cases_are_prepared_where_memory_is_short(
    gib: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, gib * 2**30))
    assert measure_ops.compiling(torch.device("cuda")) == expected
    assert measure_ops.compiling(CPU) == 14


class Scripted:
    """A worker whose first check of one object fails, and that says what it is asked."""

    def __init__(self, name: str, asked: list[str], fails: str) -> None:
        self.name, self.asked, self.fails = name, asked, fails
        self.kept: set[str] = set()

    def make(self, key: str, factory: str, **arguments: Any) -> None:
        self.kept.add(key)
        self.asked.append(f"make {self.name} {key}")

    def call(self, key: str, method: str, *args: Any) -> Any:
        assert key in self.kept, f"{method} of {key}, which this process has not made"
        self.asked.append(f"{method} {self.name} {key}")
        if method == "check_first":
            started = self.asked.count("checking")
            self.asked.append("checking")
            time.sleep(0.01)
            self.asked.remove("checking")
            assert started < CHECKING
            if f"{self.name} {key}" == self.fails:
                raise WorkerError("wrong")
        return {}

    def drop(self, key: str) -> None:
        self.kept.remove(key)

    def close(self) -> None:
        self.kept.clear()

    hang_up = close


def test_each_provider_is_made_and_checked_once_ahead_and_again_where_its_process_was_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    ops = [OPS["rope"], OPS["silu_mul"], OPS["transpose"]]
    bench = Bench("fp32", CPU, ops)
    fails = f"eager {bench.runs[1].key}"
    monkeypatch.setattr(measure_ops, "Worker", lambda name, **_: Scripted(name, asked, fails))
    bench.workers = {}
    bench._prepare(bench.runs)
    assert [run.failed.keys() for run in bench.runs] == [set(), {"eager"}, set()]
    first, wrong, last = (run.key for run in bench.runs)
    ahead = [line for line in asked if line.startswith("check_first eager")]
    assert ahead == [f"check_first eager {key}" for key in (first, wrong, last)]
    for run in bench.runs:
        for name in [one for one in providers_of(run.op) if one not in run.cannot]:
            bench._guarded(run, name, bench._warm_up)
    again = [line for line in asked if line.startswith("check_first eager")][len(ahead) :]
    assert again == [f"check_first eager {first}"], "its process was replaced by the failure"
    assert asked.count(f"check_first torch {first}") == 1
    assert [line for line in asked if line.startswith("warm_up eager")] == [
        f"warm_up eager {first}",
        f"warm_up eager {last}",
    ]


def test_calls_in_a_row_are_timed_alternately_of_what_is_small_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench("fp32", CPU, [OPS["silu_mul"]])
    (run,) = bench.runs
    asked: list[str] = []

    def ask(run: OpCaseRun, name: str, method: str) -> float | None:
        assert method == "in_a_row"
        asked.append(name)
        if name == "liger" and asked.count(name) == 2:
            raise WorkerError("wrong")
        return None if name == "eager" else float(len(asked))

    monkeypatch.setattr(bench, "_ask", ask)
    names = ["eager", "torch", "liger"]
    bench._repeat(run, names)
    assert asked == [], "not on a CPU, where it is the time of the call"
    bench.effort = replace(bench.effort, repeats=2)
    bench._repeat(run, names)
    assert asked == ["eager", "torch", "liger", "liger", "torch", "eager"]
    assert run.repeated == {"torch": [2.0, 5.0]}
    assert list(run.failed) == ["liger"]
    assert Effort.on(torch.device("cuda")).repeats > 0
    assert Effort.on(torch.device("cuda")).short().repeats == 0


def test_processes_are_prepared_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("fp32", CPU, [OPS["silu_mul"]])
    (run,) = bench.runs
    together = threading.Barrier(2, timeout=10)
    names = []

    def ready(self: Bench, run: OpCaseRun, name: str) -> None:
        names.append(name)
        together.wait()

    monkeypatch.setattr(Bench, "_ready", ready)
    bench._prepare(bench.runs)
    assert sorted(names) == ["eager", "torch"]
    assert not run.failed
