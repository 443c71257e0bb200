"""Which groups a session measures, what is judged again, saved and said of them at its end."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

from correctness_tests.support.sample_records import ops, plain_record
from tinyllama.harness.plugins import recording
from tinyllama.harness.plugins.groups import Group, GroupRecord
from tinyllama.harness.plugins.recording import Recording
from tinyllama.harness.records.verdict import Outcome, Verdict


def made(*, compare: bool = True, stored: Any = (), named: Any = None, **option: Any) -> Recording:
    """A session in which groups a, b and c may be measured."""
    options = {"groups": None, "resume": False, "record": False, **option}
    config: Any = SimpleNamespace(
        option=SimpleNamespace(**options),
        hook=Mock(),
        args=["perf_tests"],
        rootpath=Path("root"),
        pluginmanager=Mock(),
    )
    team: Any = SimpleNamespace(
        lines=lambda: ["of the team"], asked=lambda asked: named, groups=named, tolerances={}
    )
    found = Recording(config, Path("results"), compare=compare, team=team)
    found.declared = found.expected = ["a", "b", "c"]
    found.stored = list(stored)
    return found


# -- which groups ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "named", "chosen"),
    [
        (None, None, ["a", "b", "c"]),
        ("c, a", None, ["c", "a"]),
        ("short", None, ["b", "x", "c"]),
        ("a,x", None, ["a", "x"]),
        (None, ["c", "b"], ["c", "b"]),
        (None, ["c", "gone", "d"], ["c"]),
    ],
)
def test_groups_are_chosen_by_the_option_or_by_a_team(
    groups: str | None, named: Any, chosen: list[str]
) -> None:
    session = made(groups=groups, named=named)
    session.short = ["b", "x", "c"]
    assert session._chosen() == chosen
    told = (
        ["of pyproject.toml, not measured on this device: gone, d"] if "gone" in str(named) else []
    )
    assert session.lines == ["of the team", *told]


@pytest.mark.parametrize(
    ("groups", "named", "said"),
    [
        ("a,x", None, "--groups names 'x', which is not measured on this device: choose from a, b"),
        ("short", None, "--groups short: no short set is declared .*: name groups of a, b, c$"),
        (None, ["x", "y"], "pyproject.toml names x, y, and none is .*: give --groups some of a, b"),
    ],
)
def test_groups_that_are_not_measured_here_are_refused(groups: Any, named: Any, said: str) -> None:
    session = made(groups=groups, named=named)
    with pytest.raises(pytest.UsageError, match=said):
        session._chosen()


@pytest.mark.parametrize("compare", [True, False])
@pytest.mark.parametrize("commit", ["a" * 40, "a" * 40 + "+dirty", "unknown"])
def test_what_this_code_recorded_whole_is_not_measured_again(
    commit: str, compare: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last such record counts, and is judged by those before it."""
    this, other = {"commit": "a" * 40}, {"commit": "b" * 40}
    stored = [
        plain_record(group="a", date="2030-01-01T00:00:00Z", **this),
        plain_record(group="a", date="2030-01-02T00:00:00Z", **this),
        plain_record(group="a", date="2030-01-03T00:00:00Z", **other),
        plain_record(group="b", complete=False, **this),
        plain_record(group="c", device="another", **this),
    ]
    session = made(compare=compare, stored=stored, resume=True)
    monkeypatch.setattr(recording, "worker_device", lambda config: torch.device("cpu"))
    monkeypatch.setattr(
        recording.results,
        "new_record",
        lambda device, name, root: plain_record(group=name, commit=commit),
    )
    judged = Mock(return_value=[Verdict("x", Outcome.SAME, "")])
    monkeypatch.setattr(recording, "judge", judged)
    found = session._resumed()
    if commit != "a" * 40:
        assert found == {}
        assert session.lines[1:] == ["--resume skips nothing: the tree is not that of a commit"]
        return
    assert found == {"a": "--resume: a was recorded at 2030-01-02T00:00:00Z"}
    assert judged.mock_calls == ([call(stored[1], stored[:1])] if compare else [])
    assert [name for name, _ in session.verdicts] == ["a"] * compare


# -- what is said of one --------------------------------------------------------------------------


def measured(session: Recording, name: str, **fields: Any) -> Group:
    state = Group(name, left=True, **fields)
    state.measured = GroupRecord(plain_record(group=name))
    session.groups[name] = state
    return state


def test_a_group_is_judged_once_it_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    session = made()
    monkeypatch.setattr(recording, "judge", judged := Mock(return_value=[]))
    monkeypatch.setattr(session, "_save", saved := Mock())
    state = measured(session, "a")
    state.left = False
    session.finish(state)
    session.finish(Group("b", left=True))
    assert not judged.called
    state.left = True
    session.finish(state)
    session.finish(state)
    assert state.measured
    record = state.measured.record
    assert judged.mock_calls == [call(record, session.stored)]
    assert saved.mock_calls == [call(record)]
    assert record.complete
    session.elsewhere = [plain_record(group="c")]
    assert [one.group for one in session.finished()] == ["a", "c"]


@pytest.mark.parametrize("named", [(), ("rms_norm",), ("swiglu", "rms_norm"), ("gone",)])
def test_a_record_of_some_ops_is_compared_with_these_alone(
    named: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with what is of no op."""
    stored = [plain_record(group="a", entries=ops()), plain_record(group="a")]
    session = made(stored=stored)
    session.ops = named
    monkeypatch.setattr(recording, "judge", judged := Mock(return_value=[]))
    monkeypatch.setattr(session, "_save", Mock())
    session.finish(measured(session, "a"))
    ((_, compared),) = (one.args for one in judged.mock_calls)
    assert [len(one.entries) for one in compared][1:] == [0]
    kept = [getattr(one, "op", None) for one in compared[0].entries]
    every = [getattr(one, "op", None) for one in ops()]
    assert kept == [op for op in every if not named or op in (None, *named)]
    assert None in kept


@pytest.mark.parametrize(
    ("args", "verdicts", "complete"),
    [
        (["perf_tests"], [Outcome.SAME], True),
        (["perf_tests"], [Outcome.SAME, Outcome.SLOWER], Outcome.SLOWER.may_be_baseline),
        (["perf_tests"], [Outcome.WRONG_RESULT], False),
        (["perf_tests/a.py::test_one"], [Outcome.SAME], False),
    ],
)
def test_a_record_is_complete_where_all_of_it_is_good(
    args: list[str], verdicts: list[Outcome], complete: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = made()
    session.config.args[:] = args
    given = [Verdict("x", outcome, "") for outcome in verdicts]
    monkeypatch.setattr(recording, "judge", Mock(return_value=given))
    monkeypatch.setattr(session, "_save", Mock())
    state = measured(session, "a")
    session.finish(state)
    assert state.measured
    assert state.measured.record.complete is complete
    one_by_one = [Outcome.MISSING] if "::" in args[0] else []
    assert [(name, one.outcome) for name, one in session.verdicts] == [
        ("a", outcome) for outcome in [*verdicts, *one_by_one]
    ]


def test_what_is_only_shown_is_neither_judged_nor_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    session = made(compare=False)
    monkeypatch.setattr(session, "_save", saved := Mock())
    session.finish(measured(session, "a", disturbed="another process"))
    assert session.lines[1:] == ["BUSY a: another process"]
    assert not saved.called
    assert session.verdicts == []


@pytest.mark.parametrize(
    ("record", "complete", "commit", "line"),
    [
        (False, True, "a", "recorded there"),
        (False, False, "a", "not recorded g: no baseline, since it is not complete and good"),
        (False, True, "a+dirty", "not recorded g: no baseline, since tracked files differ from"),
        (False, True, "a", "not recorded g: no baseline, since it is of a, b alone"),
        (True, True, "a", "recorded there: no baseline, since it is of a, b alone"),
        (True, False, "a", "recorded there: no baseline, since it is not complete and good"),
        (True, True, "a+dirty", "recorded there: no baseline, since tracked files differ from"),
    ],
)
def test_a_record_that_is_no_baseline_is_saved_where_that_is_asked_for(
    record: bool, complete: bool, commit: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = made(record=record)
    session.ops = ("a", "b") if "alone" in line else ()
    monkeypatch.setattr(recording.results, "save", save := Mock(return_value="there"))
    one = plain_record(group="g", complete=complete, commit=commit)
    session._save(one)
    assert session.lines[-1].startswith(line)
    assert save.mock_calls == ([call(one, Path("results"))] if "not" not in line[:3] else [])
    session.ops = ()
    save.side_effect = OSError("no space")
    session._save(plain_record(group="g"))
    ((name, verdict),) = session.verdicts
    assert (name, verdict.outcome) == ("g", Outcome.MISSING)
    assert verdict.text == "it could not be recorded: no space"


# -- at the end -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "outcomes", "ended", "last"),
    [
        (0, [Outcome.SAME], 0, None),
        (0, [Outcome.SAME, Outcome.SLOWER], 10, "exit status 10; the worst verdict is SLOWER (10)"),
        (5, [Outcome.SLOWER], 10, "exit status 10; the worst verdict is SLOWER (10)"),
        (1, [Outcome.SLOWER], 1, "exit status 1; the worst verdict is SLOWER (10)"),
        (3, [Outcome.SLOWER], 3, None),
        (4, [Outcome.SLOWER], 4, None),
    ],
)
def test_the_status_is_the_worst_verdicts_unless_pytest_has_one(
    status: int,
    outcomes: list[Outcome],
    ended: int,
    last: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = made()
    session.declared, session.expected = ["a"], []
    session.verdicts = [("a", Verdict("x", outcome, "")) for outcome in outcomes]
    monkeypatch.setattr(recording, "report_verdict", shown := Mock())
    run: Any = SimpleNamespace(exitstatus=pytest.ExitCode(status), testscollected=7)
    session.conclude(run)
    assert int(run.exitstatus) == ended
    reported = status not in (3, 4)
    assert run.testscollected == 7 + len(outcomes) * reported
    assert shown.call_count == len(outcomes) * reported
    assert session.lines[1:] == ([last] if last else [])


def test_groups_that_never_came_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "report_verdict", Mock())
    session = made()
    measured(session, "a").finished = True
    session.groups["b"] = Group("b", disturbed="another process")
    session.assigned = {"c"}
    run: Any = SimpleNamespace(exitstatus=pytest.ExitCode.OK, testscollected=0)
    session.conclude(run)
    assert [(name, one.outcome) for name, one in session.verdicts] == [
        ("b", Outcome.MISSING),
        ("b", Outcome.BUSY),
    ]
    assert run.exitstatus == Outcome.MISSING.status
    empty = made()
    empty.declared = empty.expected = []
    empty.conclude(run)
    assert [one.text for _, one in empty.verdicts] == [
        "no groups are declared: nothing is known to be measured here"
    ]


@pytest.mark.parametrize(
    ("measured", "left", "by_itself"),
    [(Mock(), [], True), (Mock(), ["x"], False), (None, [], False), (None, ["x"], False)],
)
def test_of_a_group_that_could_not_be_measured_the_first_test_says_why(
    measured: Any, left: list[str], by_itself: bool
) -> None:
    state: Any = SimpleNamespace(name="g", measured=measured, left=left, broken=None)
    first, second = reports = [
        SimpleNamespace(nodeid=name, outcome="failed", longrepr="why", location=(name, 3, name))
        for name in ("a", "b")
    ]
    for report in reports:
        Recording._once(state, report)  # type: ignore[arg-type]
    assert (first.outcome, first.longrepr) == ("failed", "why")
    if by_itself:
        assert (state.broken, second.outcome, second.longrepr) == (None, "failed", "why")
        return
    assert (state.broken, second.outcome) == ("a", "skipped")
    assert second.longrepr == ("b", 0, "Skipped: g could not be measured: see a")
    assert second.unmeasured
