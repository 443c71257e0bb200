"""One contender that fails stops no other: it has no time, and its entry says why."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tinyllama.bench.contender import Contender
from tinyllama.bench.measure import StepGroup, entry_of
from tinyllama.bench.workloads import Group
from tinyllama.harness.machine.worker import WorkerError

CPU = torch.device("cpu")
NAMES = ("v1", "v2", "v3")
QUESTIONS = ("memory", "verify", "warm_up", "turn", "launched", "loss_series")
ANSWERS: dict[str, Any] = {"warm_up": 1.0, "turn": 1.0}


class ScriptedWorker:
    """A process of a contender whose step loses ``learns`` in each step. It raises an error at one
    question, ``broken_at``, and at all after it was closed."""

    def __init__(self, broken_at: str = "", learns: float = 0.1) -> None:
        self.broken_at, self.learns = broken_at, learns
        self.closed = False

    def make(self, key: str, factory: str, *, timeout: float, **arguments: Any) -> None:
        self.call(key, "make")

    def call(self, key: str, question: str, *arguments: Any) -> Any:
        if question == self.broken_at or self.closed:
            raise WorkerError(f"it broke at {question}")
        if question == "loss_series":
            return [7 - self.learns * step for step in range(20)]
        return ANSWERS.get(question, {})

    def hang_up(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


@dataclass(frozen=True)
class Scripted(Contender):
    """A contender with a process of a script."""

    script: ScriptedWorker = field(default_factory=ScriptedWorker)

    def worker(self) -> Any:
        return self.script


def contender(name: str, script: ScriptedWorker | None = None) -> Contender:
    return Scripted(name, name, "tier", "nowhere:Nothing", script=script or ScriptedWorker())


def measured_with(**workers: ScriptedWorker) -> StepGroup:
    """The three contenders, measured; those that are not named do not fail."""
    with StepGroup(Group("tiny", "bf16"), CPU) as steps:
        steps.prepare([contender(name, workers.get(name)) for name in NAMES])
        steps.time()
        steps.look_closer()
    return steps


@pytest.mark.parametrize("question", ["make", *QUESTIONS])
def test_a_contender_that_fails_stops_no_other(question: str) -> None:
    worker = ScriptedWorker(broken_at=question)
    measured = measured_with(v2=worker)
    assert list(measured.seconds) == ["v1", "v3"]
    assert worker.closed, "others need the memory that it holds"
    entry = entry_of(contender("v2"), measured, 1.0)
    assert (entry.seconds, entry.cannot) == (None, f"it broke at {question}")


@pytest.mark.parametrize(
    ("learns", "timed"), [(0.1, True), (0.095, True), (0.05, False), (0.0, False)]
)
def test_a_contender_that_learns_less_than_v1_has_no_time(learns: float, timed: bool) -> None:
    measured = measured_with(v2=ScriptedWorker(learns=learns))
    assert ("v2" in measured.seconds) is timed
    if not timed:
        assert "it does not learn" in str(entry_of(contender("v2"), measured, 1.0).cannot)


def test_where_v1_does_not_learn_nothing_has_a_time() -> None:
    workers = {"v1": ScriptedWorker(learns=-0.1), "v2": ScriptedWorker(learns=0.0)}
    assert "v1" not in measured_with(**workers).seconds
    assert "v2" not in measured_with(**workers).seconds
