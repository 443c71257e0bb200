"""Cases are compiled some at a time: each compiled one keeps a process, and memory, until it is
measured."""

import pytest
import torch

from tinyllama.bench import measure_ops
from tinyllama.bench.measure_ops import Bench, OpCaseRun
from tinyllama.ops import OPS


def test_few_compiled_cases_wait_for_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: set[str] = set()
    measured: list[str] = []
    most = 0

    def compile_it(bench: Bench, run: OpCaseRun) -> None:
        waiting.add(run.op.name)

    def one(bench: Bench, run: OpCaseRun) -> None:
        nonlocal most
        most = max(most, len(waiting))
        waiting.remove(run.op.name)
        measured.append(run.op.name)

    monkeypatch.setattr(Bench, "_compile", compile_it)
    monkeypatch.setattr(Bench, "_one", one)
    monkeypatch.setattr(measure_ops, "COMPILING", 3)
    found = Bench("fp32", torch.device("cpu"), OPS.values()).measure()
    assert len(measured) == len(found) == len(OPS) > 3
    assert most == 3
