"""The tool that mutates kernels: what it changes, and that a mutant runs in its kernel's place."""

import os
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("triton")

from tinyllama.harness.correct.checks import Candidate
from tinyllama.harness.kernels.launch import Kernel, identity, jit, tl
from tinyllama.harness.records.results import records
from tools import mutant_record, mutant_trials, mutants
from tools.mutant_record import Trial
from tools.mutation import Mutant, mutants_of
from tools.tested import ENDED, KILLED, RAISED, SURVIVED

Kernels = dict[str, tuple[Kernel, list[Candidate]]]


@pytest.fixture(scope="module")
def found() -> Kernels:
    return mutant_trials.kernels()


@jit
def kernel(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A docstring - with a minus - stays."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seen = tl.load(x + at, mask=at < n, other=0.0)
    tl.store(y + at, tl.where(seen > 0, seen, -seen), mask=at < n)


def test_each_operator_number_mask_and_choice_is_changed() -> None:
    texts = {mutant.text for mutant in mutants_of(kernel)}
    assert {
        "tl.program_id(0) * BLOCK -> tl.program_id(0) + BLOCK",
        "at < n -> at <= n",
        "0.0 -> 1.0",
        "tl.load(x + at, mask=at < n, other=0.0) -> tl.load(x + at)",
        "tl.where(seen > 0, seen, -seen) -> tl.where(seen > 0, -seen, seen)",
        "-seen -> +seen",
    } <= texts
    assert not any("docstring" in text for text in texts)
    lines = {mutant.gives for mutant in mutants_of(kernel) if mutant.text == "0 -> 1"}
    assert len(lines) == 3, "the same change in another place has another name"
    for mutant in mutants_of(kernel):
        compile(mutant.source, "mutant", "exec")
        assert mutant.source != kernel.src
        assert mutant.line > kernel.fn.__code__.co_firstlineno


def test_every_kernel_has_a_provider_that_runs_it(found: Kernels) -> None:
    assert {"silu_mul.sigmoids", "rope.rotate_kernel", "attention.forward_kernel"} <= set(found)
    bare = {name for name, (kernel, users) in found.items() if users and not mutants_of(kernel)}
    # They hold two instructions of a GPU, and nothing to change.
    assert bare <= {f"launch.{name}" for name in ("begin", "let_next_start", "wait_for_last")}


EXPECTED = {
    "1 + small -> 1 - small": KILLED,
    "x < 0 -> x <= 0": SURVIVED,  # at 0 both ways give one half; nothing of the first stays
}


def test_a_mutant_is_tried_in_a_process_of_its_own(
    found: Kernels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not in a fork of this one, which may have used autograd, and a GPU."""
    kernel, users = found["silu_mul.sigmoids"]
    sources = {mutant.text: mutant.source for mutant in mutants_of(kernel)}

    def fork() -> int:
        raise AssertionError("this process is forked")

    monkeypatch.setattr(os, "fork", fork)
    failing, raising = tmp_path / "test_failing.py", tmp_path / "test_raising.py"
    failing.write_text("def test_that_fails(): assert False")
    raising.write_text("def test_that_raises(): raise ValueError('a value')")
    user = (users[0].op.name, users[0].provider.name)
    attempt = mutant_trials.Attempt((kernel.fn.__module__, kernel.fn.__name__), [user], [])
    for change, expected in EXPECTED.items():
        outcome, check = attempt.tried(sources[change], mutant_trials.SECONDS)
        assert outcome == expected, check
        assert bool(check) is (outcome == KILLED)
    ended = mutant_trials.in_fresh_process(partial(mutant_trials.tested, [str(raising)]))
    assert ended == (RAISED, "ValueError: a value")
    monkeypatch.setattr(mutant_record, "tests", lambda: {"silu_mul.sigmoids": [str(failing)]})
    run = mutants.Run(2)
    one = mutants.subject("silu_mul.sigmoids", kernel, users[:1], 1, 0, None)
    assert list(run.trials([one])) == []
    (why,) = run.unsound.values()
    assert why.startswith("killed, "), why
    assert why.endswith("that_fails"), why


def trials_of(
    run: mutants.Run, ends: dict[str, tuple[str, str]], lengths: dict[str, int]
) -> list[tuple[str, str]]:
    """The function and the mutant of each trial, where attempts end as stated, by their source;
    lengths: mutants by function. Functions whose names begin alike have the same provider."""

    def tried(self: object, source: str, seconds: float) -> tuple[str, str]:
        return ends.get(source, (KILLED, "outputs"))

    def made(name: str) -> mutants.Subject:
        left = [Mutant(name, 1, f"{n}", f"{name}{n}", f"{name}{n}") for n in range(lengths[name])]
        attempt = mutant_trials.Attempt(("module", name), [("op", name[0])], [])
        return mutants.Subject(
            attempt, name, left, mutant_record.KernelTrials(name, "", [], 9, 0, [])
        )

    without_references = mock.patch.object(mutants, "in_fresh_process")
    with mock.patch.object(mutant_trials.Attempt, "tried", tried), without_references:
        found = run.trials([made(name) for name in lengths])
        return [(one.made.kernel, trial.gives) for one, trial in found]


def test_functions_take_turns_and_none_is_tried_that_fails_unchanged() -> None:
    """So a run that is stopped has tried about as many mutants of each."""
    run = mutants.Run(1)
    ends = {"a": (SURVIVED, ""), "b": (SURVIVED, ""), "c": (KILLED, "outputs")}
    found = trials_of(run, ends, {"a": 3, "b": 2, "c": 2})
    # The first of `a` is tried before `b` is known to be sound.
    assert sorted(found[:4]) == [("a", "a0"), ("a", "a1"), ("b", "b0"), ("b", "b1")]
    assert found[4:] == [("a", "a2")]
    assert run.unsound == {"c": "killed, outputs"}


def test_functions_of_the_same_providers_are_run_unchanged_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is run once would be run for each of twenty functions; all are planted, with the tests
    of all, so that none is taken for sound that is not."""
    asked: list[tuple[object, ...]] = []

    def tried(self: mutant_trials.Attempt, source: str, seconds: float) -> tuple[str, str]:
        asked.append((self.kernel, source, list(self.others), self.tests))
        return (SURVIVED, "")

    def made(name: str) -> mutants.Subject:
        attempt = mutant_trials.Attempt(("module", name), [("op", name[0])], [f"test_{name}", "t"])
        mutant = Mutant(name, 1, "", f"changed {name}", f"changed {name}")
        record = mutant_record.KernelTrials(name, "", [], 9, 0, [])
        return mutants.Subject(attempt, f"source of {name}", [mutant], record)

    monkeypatch.setattr(mutant_trials.Attempt, "tried", tried)
    monkeypatch.setattr(mutants, "in_fresh_process", lambda work: None)
    assert len(list(mutants.Run(1).trials([made("a1"), made("b"), made("a2")]))) == 3
    other = (("module", "a2"), "source of a2")
    assert asked[0] == (("module", "a1"), "source of a1", [other], ["test_a1", "t", "test_a2"])
    assert asked[1:2] == [(("module", "b"), "source of b", [], ["test_b", "t"])]
    assert asked[2:] == [
        (("module", name), f"changed {name}", [], [f"test_{name}", "t"])
        for name in ("a1", "b", "a2")
    ]
    run = mutants.Run(1)
    ends = {"a1": (RAISED, "an error"), "b": (SURVIVED, "")}
    monkeypatch.undo()
    assert trials_of(run, ends, {"a1": 1, "b": 1, "a2": 1}) == [("b", "b0")]
    assert run.unsound == dict.fromkeys(("a1", "a2"), "raised, an error")


def test_what_the_end_of_the_run_cuts_off_is_no_trial() -> None:
    run = mutants.Run(1, end=time.monotonic() + 3600)
    ends = {"a": (SURVIVED, ""), "a0": (ENDED, "")}
    assert trials_of(run, ends, {"a": 1}) == [("a", "a0")]

    def late(self: object, source: str, seconds: float) -> tuple[str, str]:
        run.end = time.monotonic() if source == "a0" else run.end
        return (ENDED, "") if source == "a0" else (SURVIVED, "")

    left = [Mutant("a", 1, "0", "a0", "a0"), Mutant("a", 1, "1", "a1", "a1")]
    attempt = mutant_trials.Attempt(("module", "a"), [], [])
    made = mutant_record.KernelTrials("a", "", [], 9, 0, [])
    with mock.patch.object(mutant_trials.Attempt, "tried", late):
        assert list(run.trials([mutants.Subject(attempt, "a", left, made)])) == []


def test_a_run_is_continued_from_its_file(found: Kernels, tmp_path: Path) -> None:
    name = "silu_mul.sigmoids"
    kernel, users = found[name]
    file = tmp_path / "mutants.json"
    first = mutants.subject(name, kernel, users, 3, 0, file)
    assert len(first.left) == 3
    mutant = first.left[1]
    trial = Trial(mutant.line, mutant.text, mutant.gives, KILLED, "outputs")
    mutant_record.add(file, [replace(first.made, trials=[trial])])
    again = mutants.subject(name, kernel, users, 3, 0, file)
    assert again.left == [first.left[0], first.left[2]]
    assert again.made.trials == [trial]
    # Of a function that has changed since, nothing is kept.
    mutant_record.add(file, [replace(first.made, source="0123", trials=[trial])])
    assert mutants.subject(name, kernel, users, 3, 0, file).left == first.left


@pytest.mark.parametrize(
    ("outcome", "known", "status"),
    [(SURVIVED, False, 1), (SURVIVED, True, 0), (KILLED, False, 0)],
    ids=["survived", "explained", "killed"],
)
def test_only_a_survivor_without_a_reason_is_red(
    outcome: str,
    known: bool,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = identity(kernel)
    trial = Trial(3, "1 -> 2", "x = 2", outcome)
    monkeypatch.setattr(mutants, "kernels", lambda: {name: (kernel, [])})
    monkeypatch.setattr(mutants.Run, "trials", lambda self, some: [(one, trial) for one in some])
    monkeypatch.setattr(mutant_record, "explained", lambda: {(name, "x = 2")} if known else set())
    assert mutants.main([]) == status
    assert f"1 {outcome}; 1 of {len(mutants_of(kernel))} mutants" in capsys.readouterr().out


def test_what_does_not_end_or_ends_its_process_is_told_apart() -> None:
    assert mutant_trials.in_fresh_process(partial(max, 3, 5)) == 5
    with pytest.raises(TimeoutError, match="no answer in 1 s"):
        mutant_trials.in_fresh_process(partial(time.sleep, 60), seconds=1)
    with pytest.raises(ChildProcessError, match="ended with status 3"):
        mutant_trials.in_fresh_process(partial(os._exit, 3))


def test_each_explanation_is_of_one_mutant_and_each_test_exists(found: Kernels) -> None:
    """Of the kernels as they are now: a change of one leaves no reason behind."""
    names = Counter(m.name for kernel, _ in found.values() for m in mutants_of(kernel))
    explained = [one for one in mutant_record.explained() if not one[0].startswith("tinyllama.")]
    assert {name: names[name] for name in explained if names[name] != 1} == {}
    assert set(mutant_record.on_a_gpu()) <= set(found)
    for kernel, tests in mutant_record.tests().items():
        assert kernel in found
        for test in tests:
            file, _, function = test.partition("::")
            assert f"def {function}(" in (mutant_record.ROOT / file).read_text(encoding="utf-8"), (
                test
            )


def test_no_recorded_mutant_survives_without_a_reason(tmp_path: Path) -> None:
    known = mutant_record.explained()
    recorded = mutant_record.load(mutant_record.RECORD)
    assert recorded
    for tried in recorded:
        assert not tried.unexplained(known), tried.text(known)
    trial = Trial(3, "1 -> 2", "x = 2", SURVIVED)
    made = mutant_record.KernelTrials("file.kernel", "0123", ["op-triton"], 1, 0, [trial])
    assert made.unexplained({("file.kernel", "x = 3"), ("file.other", "x = 2")}) == [trial]
    assert made.unexplained({("file.kernel", "x = 2")}) == []
    mutant_record.add(tmp_path / "record.json", [made])
    assert mutant_record.load(tmp_path / "record.json") == [made]


def test_the_table_counts_no_function_that_has_changed_since(tmp_path: Path) -> None:
    functions, record = mutant_record.functions(), tmp_path / "record.json"
    first, second = list(functions)[:2]
    source = mutant_record.digest(functions[first].src)
    trials = [Trial(3, "1 -> 2", "x = 2", KILLED)]
    made = mutant_record.KernelTrials(first, source, [], 7, 0, trials)
    mutant_record.add(record, [made, replace(made, kernel=second)])
    *rows, every, _, left = mutant_record.table(record).splitlines()
    assert [row.split("|")[1].strip() for row in rows[2:]] == [f"`{first}`"]
    assert every.startswith("| all | 1 | 1 |")
    assert left == f"Changed since they were tried: `{second}`."


def test_what_lies_beside_the_records_is_not_read_as_one() -> None:
    results = mutant_record.RECORD.parent
    files = {path.name for path in results.glob("*.json")}
    assert files == {"field.json", "module_mutants.json", "mutants.json"}
    assert not files & {path.name for path, _ in records(results)}
