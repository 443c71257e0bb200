"""The tool that mutates Python modules: what it changes, and what it tries a change with."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from tools import module_mutants, mutant_record
from tools.module_mutants import Mutant, run_tests
from tools.mutant_record import ENDED, KILLED, RAISED, SURVIVED, Trial, Tried
from tools.mutation import changes_of, defaults

SOURCE = '''
"""A docstring - with a minus - stays."""
from math import pi

LIMIT: float = 2.0


class Config:
    eps: float = 1e-5


def first(config: Config, one: int, other: int) -> int:
    synchronize(one)
    if one < other and not config.eps:
        raise ValueError(f"{one + 1} - no message is changed")
    for item in [one, other]:
        one += item
    return config.eps * one
'''


def test_each_kind_of_change_is_made_in_its_place_alone() -> None:
    found = changes_of(SOURCE, defaults([SOURCE]))
    texts = {change.text for change in found}
    expected = {
        "2.0 -> 20.0",
        "1e-05 -> 0.0001",
        "synchronize(one) -> pass",
        "one -> other",
        "one < other -> one <= other",
        "one < other and (not config.eps) -> one < other or not config.eps",
        "one < other and (not config.eps) -> not (one < other and (not config.eps))",
        "[one, other] -> list([one, other])[:-1]",
        "one += item -> one -= item",
        "config.eps -> 1e-05",
        "config.eps * one -> config.eps + one",
    }
    assert expected - texts == set()
    assert not any("message" in text or "docstring" in text for text in texts)
    for change in found:
        compile(change.source, "mutant", "exec")
        same = [a == b for a, b in zip(SOURCE.split("\n"), change.source.split("\n"), strict=True)]
        assert same.count(False) == 1, change.text
        assert change.place in ("", "first")
    names = {(change.text, change.gives) for change in found}
    assert ("2.0 -> 20.0", "LIMIT: float = 20.0") in names


def test_the_tests_of_a_module_are_those_that_import_it() -> None:
    found = module_mutants.tests_of
    assert "correctness_tests/harness/test_clock.py" in found("tinyllama.harness.measure.clock")
    # Through a module of correctness_tests.support.
    assert "correctness_tests/gate/test_gate_pair.py" in found("tinyllama.harness.gate.pair")
    # No test imports it: those of the modules that do.
    assert found("tinyllama.training.memory")


def test_every_module_is_tested() -> None:
    modules = {one.module for one in module_mutants.mutants()}
    # What the package `tinyllama.model` itself has is one name, for users.
    assert {one for one in modules if not module_mutants.tests_of(one)} <= {"tinyllama.model"}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "here.py").write_text("def twice(x): return 2 * x\n")
    (tmp_path / "test_here.py").write_text(
        "import here\ndef test_twice(): assert here.twice(3) == 6\n"
    )
    return tmp_path


@pytest.mark.slow("five runs of pytest in processes of their own")
def test_what_fails_raises_and_does_not_end_is_told_apart(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(mutant_record.ROOT))
    test = str(tree / "test_here.py")

    def ended(source: str, seconds: float = 120) -> str:
        (tree / "here.py").write_text(source)
        return run_tests(mutant_record.ROOT, [test], seconds)[0]

    assert ended("def twice(x): return 2 * x") == SURVIVED
    assert ended("def twice(x): return 2 + x") == KILLED
    assert ended("def twice(x): return x.y") == RAISED
    assert ended("import time\ndef twice(x): time.sleep(600)", seconds=20) == ENDED
    assert not module_mutants._tagged("nothing")


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    tried = [
        Tried("a.b", Trial(3, "1 -> 2", "x = 2", SURVIVED)),
        Tried("a.c", Trial(4, "1 -> 3", "x = 3", KILLED, "test_it")),
    ]
    mutant_record.write(tmp_path / "record.json", 7, 99, tried)
    assert mutant_record.read(tmp_path / "record.json") == tried
    assert tried[0].unexplained(set())
    assert not tried[0].unexplained({("a.b", "x = 2")})
    assert not tried[1].unexplained(set())


def test_a_module_that_no_test_imports_survives(tmp_path: Path) -> None:
    change = changes_of(SOURCE, {})[0]
    (tmp_path / "here.py").write_text(SOURCE)
    trial = Mutant("here", "here.py", change).tried(tmp_path, [], 1.0)
    assert (trial.outcome, trial.check) == (SURVIVED, "no test imports the module")
    assert (tmp_path / "here.py").read_text() == SOURCE
