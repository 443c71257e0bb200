"""Parts of the plugins, each by itself: groups, saved runs, cards, the seeds, the summaries.

Sessions as a whole are in test_benchmarks.py, test_plugin.py, test_spread.py and
correctness_tests/gate/test_gate_plugin.py.
"""

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

from correctness_tests.support.sample_records import bare_step, plain_record
from tinyllama.harness.gate.team import Team
from tinyllama.harness.plugins import recording, spread
from tinyllama.harness.plugins.gating import Gating
from tinyllama.harness.plugins.groups import Group, GroupRecord
from tinyllama.harness.plugins.recording import (
    KnownMiss,
    NoBarApplies,
    NotMeasured,
    Recording,
)
from tinyllama.harness.records.outcome import TO_DO, Outcome
from tinyllama.harness.records.targets import Bar, Standing
from tinyllama.harness.records.verdict import Verdict

GPUS = [torch.device("cuda", index) for index in range(3)]


def report(item: str, when: str = "call", outcome: str = "passed", **more: Any) -> Any:
    made = pytest.TestReport(
        nodeid=item,
        location=("file", 1, item),
        keywords={},
        outcome=outcome,  # type: ignore[arg-type]
        longrepr=more.pop("longrepr", None),
        when=when,  # type: ignore[arg-type]
    )
    vars(made).update(more)
    return made


# -- groups ------------------------------------------------------------------------------------


def group(*reports: Any, **fields: Any) -> Group:
    kept: dict[str, list[pytest.TestReport]] = defaultdict(list)
    for one in reports:
        kept[one.nodeid].append(one)
    return Group("g", reports=kept, **fields)


def whole(item: str, **call: Any) -> list[Any]:
    return [report(item, "setup"), report(item, **call), report(item, "teardown")]


def test_measurements_of_a_group_have_names_of_their_own_and_usual_tolerances() -> None:
    made = GroupRecord(plain_record(), {"seconds": 1.2, "kernels": 1.5})
    own = bare_step("small-bf16", "v2", tolerances={"seconds": 1.1})
    made.add(bare_step("small-bf16", "v1"), own)
    found = {entry.who: entry.tolerances for entry in made.record.entries}
    assert found == {"v1": {"seconds": 1.2, "kernels": 1.5}, "v2": {"seconds": 1.1, "kernels": 1.5}}
    with pytest.raises(ValueError, match="'step/small-bf16/v2' is measured twice: use another"):
        made.add(own)
    with pytest.raises(ValueError, match="tolerance"):
        made.add(bare_step("small-bf16", "v3", tolerances={"seconds": 0.5}))
    assert len(made.record.entries) == 2
    plain = GroupRecord(plain_record())
    plain.add(own, bare_step("small-bf16", "v1"))
    assert [entry.tolerances for entry in plain.record.entries] == [{"seconds": 1.1}, None]


def test_an_item_has_run_when_all_of_its_phases_have() -> None:
    cut = [report("b", "setup"), report("b")]
    failed = [report("c", "setup", "failed")]
    found = group(*whole("a"), *cut, *failed, items={"a", "b", "c", "d", "e"}, slow={"e"})
    assert found.unrun == ["b", "d"]


def test_a_group_passed_when_no_phase_failed_but_to_meet_a_target() -> None:
    missed = {"outcome": "failed", "missed": "one\n two \nassert False"}
    none = {"outcome": "skipped", "not_measured": True, "longrepr": ("f", 1, "Skipped: none")}
    assert group(*whole("a"), *whole("b", **missed), targets={"b"}).passed
    assert group(*whole("a"), *whole("b", **none)).passed, "its record says why"
    assert not group(*whole("a"), *whole("b", **missed)).passed
    assert not group(*whole("b", outcome="skipped")).passed
    for place in ("setup", "call", "teardown"):
        bad = [
            report("b", when, "failed" if when == place else "passed")
            for when in ("setup", "call", "teardown")
        ]
        assert not group(*whole("a"), *bad).passed
        assert not group(*bad, *whole("a"), targets={"b"}).passed, "an error is no miss"


def test_what_was_missed_is_told_without_the_expression() -> None:
    said = {"outcome": "failed", "missed": "one \n  two\nassert not ['one', 'two']"}
    other = {"outcome": "failed", "missed": "three"}
    found = group(
        *whole("b", **other), *whole("a", **said), *whole("c", **other), targets={"a", "b"}
    )
    assert found.missed == ["one", "two", "three"]


def test_why_a_group_is_not_whole() -> None:
    skipped = {"outcome": "skipped", "longrepr": ("f", 1, "Skipped: no card")}
    expected = {"outcome": "skipped", "wasxfail": "reason: slow"}
    none = {"outcome": "skipped", "not_measured": True, "longrepr": ("f", 1, "Skipped: none")}
    again = {**skipped, "unmeasured": True}
    found = group(
        *whole("a", **skipped),
        *whole("b", **expected),
        *whole("c", **none),
        *whole("d", **again),
        items={"a", "b", "c", "d", "e", "f"},
        targets={"c"},
        disturbed="another process",
    )
    told = [(v.name, v.outcome, v.text) for v in found.problems()]
    busy = ("g", Outcome.BUSY, "another process")
    assert told == [
        ("a", Outcome.MISSING, "SKIPPED: no card"),
        ("b", Outcome.MISSING, "SKIPPED: xfail reason: slow"),
        ("g", Outcome.MISSING, "2 of its 6 tests did not run: e"),
        busy,
    ]
    found.broken = "d"
    last = [(v.name, v.outcome, v.text) for v in found.problems()][2:]
    assert last == [("g", Outcome.MISSING, "it could not be measured: d says why"), busy]
    assert group(*whole("a"), items={"a"}).problems() == []


# -- recordings --------------------------------------------------------------------------------


def a_recording(**fields: Any) -> Any:
    made: Any = object.__new__(Recording)
    option = SimpleNamespace(record=False, groups=None)
    defaults: dict[str, Any] = {
        **{"config": SimpleNamespace(option=option), "team": Team(), "compare": False},
        **{"declared": [], "expected": [], "groups": {}, "group_of": {}, "current": None},
        **{
            "verdicts": [],
            "lines": [],
            "elsewhere": [],
            "assigned": set(),
            "spread": False,
            "waits": "",
        },
    }
    vars(made).update({**defaults, **fields})
    return made


@pytest.mark.parametrize("when", ["setup", "call", "teardown"])
@pytest.mark.parametrize(
    "raised", [None, NoBarApplies, NotMeasured, AssertionError, KnownMiss, ValueError]
)
def test_a_report_tells_a_missed_bar_from_one_that_does_not_apply_and_from_an_error(
    when: str, raised: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken: list[Any] = []
    state = object()
    found = a_recording(groups={"g": state}, group_of={"item": "g"})
    monkeypatch.setattr(found, "_once", lambda *given: broken.append(given))
    seen = SimpleNamespace(type=raised, value="too slow") if raised else None
    one = report("item", when, outcome="failed" if raised else "passed")
    hook = found.pytest_runtest_makereport(SimpleNamespace(when=when, excinfo=seen))
    next(hook)
    with pytest.raises(StopIteration) as ended:
        hook.send(one)
    assert ended.value.value is one
    assert getattr(one, "not_measured", False) is (raised in (NoBarApplies, NotMeasured))
    assert hasattr(one, "missed") is (raised in (AssertionError, KnownMiss) and when == "call")
    assert getattr(one, "missed", "too slow") == "too slow"
    assert broken == ([(state, one)] if raised and when == "setup" else [])


@pytest.mark.parametrize(("expected", "said"), [(["a", "b"], "a, b"), ([], "none")])
def test_a_group_that_nobody_expects_names_those_that_are(expected: list[str], said: str) -> None:
    found = a_recording(expected=expected, compare=True)
    with (
        pytest.raises(ValueError, match=f"'c' is not expected here: expected are {said}$"),
        found.group("c"),
    ):
        pass


def test_bars_are_listed_and_those_that_are_missed_fail() -> None:
    found = a_recording(group_of={"item": "g"}, current="item")
    bars = [
        Bar(Standing.MET, "one"),
        Bar(Standing.MISSED, "two"),
        Bar(Standing.NOT_APPLICABLE, "three"),
        Bar(Standing.MISSED, "four"),
    ]
    with pytest.raises(AssertionError, match=r"^two\n *four"):
        found.hold(bars)
    assert found.lines == [
        f"{Standing.MET.value} g: one",
        f"{Standing.NOT_APPLICABLE.value} g: three",
    ]
    found.hold([bars[2], bars[0]])
    known = Bar(Standing.KNOWN_MISS, "five")
    with pytest.raises(KnownMiss, match=r"^five\nfive$"):
        found.hold([known, bars[0], known])
    with pytest.raises(AssertionError, match=r"^five\n *two"):
        found.hold([known, bars[1]])
    with pytest.raises(NoBarApplies, match="none of 2 bars of g applies on this device"):
        found.hold([bars[2], bars[2]])
    with pytest.raises(NoBarApplies, match="none of 0 bars of g applies on this device"):
        found.hold([])


def test_a_worker_says_what_it_began_and_did_not_end() -> None:
    """The others of the groups are another worker's."""
    begun = group(*whole("a")[:2], items={"a"})
    done = group(*whole("b"), items={"b"}, finished=True)
    config = SimpleNamespace(option=SimpleNamespace(record=True))
    found = a_recording(
        config=config,
        spread=True,
        expected=["other", "g", "done"],
        groups={"g": begun, "done": done, "other": Group("other")},
    )
    session: Any = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    found.conclude(session)
    assert [(name, verdict.name, verdict.text) for name, verdict in found.verdicts] == [
        ("g", "g", "expected, and not measured to its end"),
        ("g", "g", "1 of its 1 tests did not run: a"),
    ]


def test_a_verdict_is_a_test_case() -> None:
    told: list[Any] = []
    hook = SimpleNamespace(
        pytest_runtest_logstart=lambda **given: told.append(given),
        pytest_runtest_logreport=lambda report: told.append(report),
    )
    config: Any = SimpleNamespace(hook=hook)
    for outcome in (Outcome.SAME, Outcome.SLOWER):
        told.clear()
        verdict = Verdict("step/v3", outcome, "why")
        recording.report_verdict(config, "small", verdict)
        start, made = told
        place = ("compare", None, "compare step/v3")
        assert start == {"nodeid": "compare::small::step/v3", "location": place}
        assert (made.nodeid, made.location, made.when) == (*start.values(), "call")
        good = outcome is Outcome.SAME
        assert (made.outcome, made.longrepr) == (
            "passed" if good else "failed",
            None if good else str(verdict),
        )


# -- workers of xdist --------------------------------------------------------------------------


def test_what_a_worker_measured_reaches_the_session_that_started_it() -> None:
    team = Team(ops=("ops.py",))
    made = a_recording(
        team=team,
        declared=["a", "b"],
        expected=["b"],
        groups={
            "b": group(*whole("t"), finished=True, measured=GroupRecord(plain_record(group="b"))),
            "c": Group("c"),
            "a": group(*whole("u"), finished=True, measured=GroupRecord(plain_record(group="a"))),
        },
        verdicts=[("b", Verdict("v1", Outcome.SAME, "x")), ("b", Verdict("v2", Outcome.BUSY, "y"))],
        lines=[*team.lines(), "recorded here", "and there"],
    )
    output: dict[str, Any] = {}
    made.config = SimpleNamespace(workeroutput=output)
    spread.to_controller(made)
    taken = a_recording(lines=["own"], elsewhere=[], assigned={"z"})
    there = spread.Spread(taken)
    there.pytest_testnodedown(SimpleNamespace())
    assert taken.verdicts == []
    there.pytest_testnodedown(SimpleNamespace(workeroutput=json.loads(json.dumps(output))))
    assert (taken.declared, taken.expected) == (["a", "b"], ["b"])
    assert taken.assigned == {"a", "b", "z"}
    assert taken.verdicts == made.verdicts
    assert taken.lines == ["own", "recorded here", "and there"]
    assert [one.group for one in taken.elsewhere] == ["b", "a"]
    made.config = SimpleNamespace()
    spread.to_controller(made)  # no worker


def test_each_test_goes_to_the_worker_of_its_group(tmp_path: Path) -> None:
    there = spread.Spread(a_recording())
    made: list[str] = []

    def mktemp(name: str) -> Path:
        made.append(name)
        return tmp_path

    factory = SimpleNamespace(mktemp=mktemp)
    nodes = [
        SimpleNamespace(config=SimpleNamespace(_tmp_path_factory=factory), workerinput={})
        for _ in range(2)
    ]
    for node in nodes:
        there.pytest_configure_node(node)
    assert made == ["groups"]
    assert (
        nodes[0].workerinput == nodes[1].workerinput == {spread.GROUPS: f"{tmp_path}/groups.json"}
    )
    config = SimpleNamespace(workerinput=nodes[0].workerinput)
    spread.tell_groups(a_recording(config=config, group_of={"t": "g"}))
    assert [there._group_of(item) for item in ("t", "other")] == ["g", "other"]
    spread.tell_groups(a_recording())  # no worker


# -- the gate's summary ------------------------------------------------------------------------


def test_the_gate_tells_what_changed_what_it_left_out_and_its_effort() -> None:
    made: Any = object.__new__(Gating)
    reports = [
        {
            "judge_changed": [{"name": f"{name}.py", "digest": "ab"} for name in names],
            "unidentified": {"a": "moved", "b": "compiled", "c": "compiled"},
            "left_out": {"no kernel": 2},
            "seconds": {"preparing": 1.2, "timing": 30.0},
            "blocks": 9,
            "discarded": 1,
            "against": base,
        }
        for base, names in (("main", ("one", "two")), ("old", ("two", "three")))
    ]
    outcomes = (Outcome.IDENTICAL, Outcome.SAME, Outcome.SLOWER)
    made.verdicts = [("main", Verdict(f"v{n}", outcome, "t")) for n, outcome in enumerate(outcomes)]
    made.reports, made.team, made.judge = reports, Team(), "the judge"
    made.unreadable, made.ops = "no sensor", ("rope", "qkv")
    first, *rest = made.lines()
    assert first.startswith("1 ")
    assert first.endswith(f"; the worst verdict is SLOWER ({Outcome.SLOWER.status})")
    assert all(f"1 {outcome.title}" in first for outcome in outcomes)
    effort = "2 providers not timed: no kernel; preparing 1 s, timing 30 s; 9 blocks, 1 of them"
    assert rest == [
        "judged by the judge",
        "against main: SAME v1: t",
        "against main: SLOWER v2: t",
        "unwatched, since load and throttling cannot be read: no sensor",
        "--op: no other ops than rope, qkv were compared",
        *(f"changed, and the base's judged: {name}.py (ab)" for name in ("one", "two", "three")),
        "not IDENTICAL: 2 benchmarks: compiled",
        "not IDENTICAL: 1 benchmarks: moved",
        f"what to do: {TO_DO[Outcome.SLOWER]} (docs/CI.md)",
        f"against main: {effort} discarded",
        f"against old: {effort} discarded",
    ]
    made.verdicts, made.unreadable, made.ops = made.verdicts[:1], None, ()
    made.reports = []
    assert made.lines()[1:] == ["judged by the judge"]


def test_every_verdict_that_is_not_green_says_what_to_do() -> None:
    assert set(TO_DO) == {outcome for outcome in Outcome if not outcome.green}


def test_the_gate_says_once_why_it_waits() -> None:
    made: Any = object.__new__(Gating)
    made.waits, made.progress = "", Mock()
    for reason in ("busy", "busy", "hot"):
        made._wait(reason)
    waiting = call("waiting")
    busy, hot, held = (call.line(f"waiting up to 180 s: {why}") for why in ("busy", "hot", "held"))
    assert made.progress.mock_calls == [busy, waiting, waiting, hot, waiting]
    recording = a_recording(progress=Mock())
    recording._wait("held")
    recording._wait("held")
    assert recording.progress.mock_calls == [held, waiting, waiting]
