"""Parts of a gate, each by itself: what ends it, what is said before and after it, its proof."""

import io
import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tinyllama.harness.gate import (
    blocks,
    pair,
    preparing,
    proof,
    stages,
    waves,
)
from tinyllama.harness.gate.decision import CONFIRM_BLOCKS
from tinyllama.harness.gate.identity import Differs
from tinyllama.harness.gate.interrupted import Interruption
from tinyllama.harness.gate.run import unconfirmed
from tinyllama.harness.gate.stages import Stages
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.plugins import gate, gating
from tinyllama.harness.plugins.gate import Gating
from tinyllama.harness.records.outcome import Outcome
from tinyllama.harness.records.verdict import Verdict


@pytest.mark.parametrize(
    ("batch", "undecided", "expected"),
    [
        ([[], []], 3, True),
        ([[], []], 2, False),
        ([[], ["a"]], 3, False),
        ([["a"], []], 2, False),
    ],
)
def test_a_wave_makes_room_once_nothing_is_left_in_it(
    batch: Any, undecided: int, expected: bool
) -> None:
    wave: Any = object.__new__(waves._Wave)
    wave.run = SimpleNamespace(undecided=lambda: range(undecided))
    wave.which = ["a", "b"]
    assert wave._another_follows(batch) is expected


def test_the_seconds_of_each_pair_and_part_add_up_by_stage() -> None:
    wave: Any = object.__new__(waves._Wave)
    wave.run = SimpleNamespace(stage="time", seconds={"time: turns": 1.0, "other: turns": 64.0})
    pairs: list[Any] = [
        SimpleNamespace(seconds={}),
        SimpleNamespace(seconds={"start": 2.0, "turns": 4.0}),
        SimpleNamespace(seconds={"turns": 8.0, "end": 16.0}),
    ]
    wave._add_seconds(pairs)
    expected = {"time: turns": 13.0, "time: start": 2.0, "time: end": 16.0, "other: turns": 64.0}
    assert wave.run.seconds == expected


@pytest.mark.parametrize("said", ["", "a text", "7.5"])
def test_a_judge_is_told_when_the_command_began(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The 22nd field of proc(5) is when a process started; the second may have any letters."""
    fields = [str(number) for number in range(1, 53)]
    fields[1] = "(a 1) b)"
    per_second = os.sysconf("SC_CLK_TCK")
    assert 0 < stages.age() < time.clock_gettime(time.CLOCK_BOOTTIME)
    clock = SimpleNamespace(
        CLOCK_BOOTTIME=7, clock_gettime={7: 100.0}.__getitem__, monotonic=lambda: 1000.0
    )
    monkeypatch.setattr(stages, "time", clock)
    files = {"/proc/self/stat": io.StringIO(" ".join(fields))}
    monkeypatch.setattr(stages, "open", files.__getitem__, raising=False)
    monkeypatch.setenv(stages._BEGAN, said)
    began = 7.5 if said == "7.5" else 900.0 + 22 / per_second
    told = stages.handed_on()
    assert {name: float(text) for name, text in told.items()} == {
        stages._BEGAN: pytest.approx(began)
    }


class Observing:
    """A run of three benchmarks before it is known what differs. sources: of each, whole and
    without the bodies of kernels, by side."""

    def __init__(self, *sources: tuple[str, str], apart: str = "", **setting: Any) -> None:
        self.found = {
            name: SimpleNamespace(
                name=name, benchmark=SimpleNamespace(name=name, factory=name != apart)
            )
            for name in "abc"
        }
        self.sources = dict(zip("abc", sources, strict=True))
        self.asked: list[Any] = []
        given = {"toolchains": (), "measure_all": False, "differs": None, **setting}
        self.setting = SimpleNamespace(sources=self.sources_of, doing=lambda text: None, **given)
        self.trees, self.stage, self.differs = ("base", "other"), "", None
        self.new: dict[str, Any] = {}
        self.unidentified: dict[str, str] = {}
        self.undecided = lambda: list(self.found.values())
        self.untampered = lambda: self.asked.append("untampered")

    def sources_of(self, tree: str, benchmark: Any) -> list[str]:
        return [
            f"{tree} {one}" if one == "differs" else one for one in self.sources[benchmark.name]
        ]

    def observed(self) -> Any:
        run: Any = self
        with preparing._observing(run) as seen:
            return seen()


SAME_SOURCE, BODIES, OTHER = ("same", "same"), ("differs", "same"), ("differs", "differs")
ANSWER = Differs({"a": "launches", "z": "moved"}, {"a": "launches"})


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("why", ["same source", "kernels alone differ", "runs no changed file"])
def test_what_is_opened_is_asked_if_it_may_show_any_benchmark_unchanged(
    place: int, why: str
) -> None:
    sources = [OTHER] * 3
    sources[place] = {"same source": SAME_SOURCE, "kernels alone differ": BODIES}.get(why, OTHER)

    def differs(trees: Any, benchmarks: Any) -> Differs:
        run.asked.append([one.name for one in benchmarks])
        return ANSWER

    apart = "abc"[place] if why == "runs no changed file" else ""
    run = Observing(*sources, apart=apart, differs=differs)
    assert run.observed() == ANSWER
    assert run.asked == [["a", "b", "c"], "untampered"]
    assert run.unidentified == ({"a": "launches"} if place == 0 and why == "same source" else {})
    assert run.observed() == ANSWER
    assert len(run.asked) == 2, "it is asked once"


def test_what_differs_is_told_by_sources_where_nothing_else_could_tell() -> None:
    by_source = Differs({"b": "source", "c": "source"}, {"c": "source"})
    run = Observing(SAME_SOURCE, BODIES, OTHER, differs=None)
    assert run.observed() == by_source
    every = dict.fromkeys("abc", "source")
    assert Observing(OTHER, OTHER, OTHER, differs=lambda *_: ANSWER).observed() == (
        every,
        every,
        frozenset(),
    )
    timed = dict.fromkeys("abc", "everything is timed")
    for asked in ({"toolchains": ("3.12",)}, {"measure_all": True}):
        run = Observing(SAME_SOURCE, SAME_SOURCE, SAME_SOURCE, **asked)
        assert run.observed() == Differs(timed, timed)


def test_the_gate_collects_no_file_and_other_sessions_do(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").touch()
    for at_work, path, ignored in [
        (object(), tmp_path / "test_it.py", True),
        (object(), tmp_path, None),
        (None, tmp_path / "test_it.py", None),
        (None, tmp_path, None),
    ]:
        config: Any = SimpleNamespace(stash={gate.GATING: at_work})
        assert gate.pytest_ignore_collect(path, config) is ignored


def test_an_interruption_handles_signals_in_the_main_thread_until_it_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timers: list[tuple[int, float]] = []
    monkeypatch.setattr(signal, "setitimer", lambda which, left: timers.append((which, left)))
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGALRM]
    before = {one: signal.getsignal(one) for one in numbers}
    made = Interruption()

    def handled() -> list[signal.Signals]:
        now = {one: signal.getsignal(one) for one in numbers}
        other = [one for one in numbers if now[one] != before[one]]
        assert all(now[one] == made._end for one in other)
        return other

    there = threading.Thread(target=made.open, args=(9.0, 8.0))
    there.start()
    there.join()
    made.close()
    assert (handled(), made.limit, timers) == ([], None, [])
    made.open(None, 8.0)
    assert (handled(), timers) == (numbers[:2], [])
    made.close()
    assert (handled(), timers) == ([], [])
    made.open(9.0, 8.0)
    assert (handled(), made.limit) == (numbers, 8.0)
    made.close()
    assert (handled(), timers) == ([], [(signal.ITIMER_REAL, 9.0), (signal.ITIMER_REAL, 0)])
    made.open(-1.0, 8.0)  # the time was over before it began
    made.close()
    assert timers[2:] == [(signal.ITIMER_REAL, 1e-3), (signal.ITIMER_REAL, 0)]


@pytest.mark.parametrize(
    ("own", "commit", "unwatched", "expected"),
    [
        (True, "abc", False, [Outcome.JUDGE_CHANGED, "no sensor"]),
        (True, None, False, ["no sensor"]),  # another interpreter, by the same code
        (False, "abc", False, ["no sensor"]),
        (False, "abc", True, ["another process"]),
        (True, "abc", True, [Outcome.JUDGE_CHANGED, "another process"]),
    ],
)
def test_what_is_said_before_anything_is_compared(
    own: bool,
    commit: str | None,
    unwatched: bool,
    expected: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = SimpleNamespace(
        unreadable="no sensor", wait_until_idle=lambda seconds, say: "another process"
    )
    monkeypatch.setattr(gating, "Watch", lambda device: watch)
    made: Any = object.__new__(Gating)
    made.root, made.device = (gate.judge.HARNESS if own else tmp_path), torch.device("cpu")
    made.judge, made.verdicts, made.stages = "x", [], Stages()
    made.config = SimpleNamespace(option=SimpleNamespace(unwatched=unwatched))
    made._against("main", commit, "python")
    assert len(made.verdicts) == len(expected)
    for (label, verdict), said in zip(made.verdicts, expected, strict=True):
        assert label == "main"
        if isinstance(said, Outcome):
            assert verdict.outcome is said
        else:
            assert verdict.outcome is Outcome.BUSY
            assert said in verdict.text


SLOWER, SAME = Outcome.SLOWER, Outcome.SAME


@pytest.mark.parametrize(
    ("verdict", "figures", "again", "expected"),
    [
        (SLOWER, [("t", SLOWER)], 0, True),
        (SLOWER, [("t", SLOWER)], CONFIRM_BLOCKS - 1, True),
        (SLOWER, [("t", SLOWER)], CONFIRM_BLOCKS, False),
        (SAME, [("t", SLOWER)], 0, False),
        (None, [("t", SLOWER)], 0, False),
        # Times are confirmed; what is counted, as bytes are, need not be.
        (SLOWER, [("bytes", SLOWER), ("t", SAME)], 0, False),
        (SLOWER, [("t", SAME), ("u", SLOWER)], 0, True),
        (SLOWER, [], 0, False),
    ],
)
def test_only_times_that_are_slower_are_to_be_confirmed(
    verdict: Outcome | None,
    figures: list[tuple[str, Outcome]],
    again: int,
    expected: bool,
) -> None:
    one: Any = SimpleNamespace(
        verdict=verdict and Verdict("x", verdict, ""),
        figures=[SimpleNamespace(metric=name, outcome=outcome) for name, outcome in figures],
        series={"t": 0, "u": 0},
        again=again,
    )
    assert unconfirmed(one) is expected


MEAN = [0.0, 0.04, 0.0, 0.04]  # of a block's statistics: 0.02


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize(
    ("tolerance", "suspect", "settled", "shows"),
    [
        (0.039, False, False, True),
        (0.04, False, False, False),
        (0.041, False, False, False),
        (0.041, True, False, True),
        (0.039, False, True, False),
        (0.041, True, True, False),
    ],
)
def test_a_slowdown_shows_above_half_the_tolerance_or_in_a_share_of_turns(
    tolerance: float, suspect: bool, settled: bool, shows: bool, last: bool
) -> None:
    def series(statistics: list[float], tolerance: float, suspect: bool) -> Any:
        return SimpleNamespace(
            statistics=statistics, rule=SimpleNamespace(tolerance=tolerance), suspect=suspect
        )

    each = [("other", series([0.0, 0.0], 0.05, False)), ("it", series(MEAN, tolerance, suspect))]
    one: Any = SimpleNamespace(
        series=dict(each if last else each[::-1]),
        settled=lambda metric: "figure" if settled and metric == "it" else None,
    )
    assert blocks._shows_slowdown(one) is shows


REPORT = {
    "verdicts": [{"outcome": SAME.title} for _ in range(3)],
    "status": 0,
    "candidate": "tree",
    "device": "cuda (a GPU)",
    "judge": "main",
    "bases": {"main": "c0", "old": "c1"},
    "comparisons": [{"against": name, "ended": True} for name in ("main", "old")],
}


def proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changed: Any) -> str:
    monkeypatch.setattr(proof, "tree_digest", lambda root, report: "tree")
    monkeypatch.setattr(proof, "tracked_files", lambda root: ())
    asked = {
        name: changed.pop(name)
        for name in ("against", "ops", "device", "judges")
        if name in changed
    }
    monkeypatch.setattr(proof, "resolve", lambda rev, root: f"c{['main', 'old', 'new'].index(rev)}")
    report = tmp_path / "report.json"
    report.write_text(json.dumps({**REPORT, **changed}))
    return proof.verify(report, tmp_path, **asked)


def test_a_report_is_green_if_all_of_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "3 verdicts against main, old, all green, of this tree, on cuda (a GPU)"
    assert proven(tmp_path, monkeypatch) == said
    assert proven(tmp_path, monkeypatch, against=["main", "old"]) == said
    assert proven(tmp_path, monkeypatch, only=["a", "b"], ops=["b"]) == said
    assert proven(tmp_path, monkeypatch, device="cuda:1") == said
    assert proven(tmp_path, monkeypatch, judge="theirs", judges=["theirs"]) == said


@pytest.mark.parametrize("place", range(3))
def test_one_verdict_that_is_not_green_is_named(
    place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts: list[Any] = [{"outcome": SAME.title} for _ in range(3)]
    verdicts[place] = {"outcome": SLOWER.title}
    with pytest.raises(UsageError, match=f"is not green: status 0, {SLOWER.title}$"):
        proven(tmp_path, monkeypatch, verdicts=verdicts)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"status": 1}, "is not green: status 1"),
        ({"verdicts": []}, "is not green"),
        ({"bases": {}}, "is not green"),
        ({"comparisons": REPORT["comparisons"][:1]}, "a comparison did not end"),  # type: ignore[index]
        ({"comparisons": [{"against": "main", "ended": False}]}, "a comparison did not end"),
        ({"candidate": "other"}, "is of another tree"),
        ({"only": ["a", "b"]}, r"compares a, b alone \(--op\)"),
        ({"only": ["a", "b"], "ops": ["c", "b", "a"]}, "compares a, b alone"),
        ({"device": "cpu"}, r"is of cuda \(a GPU\), not of cpu"),
        ({"judge": "theirs"}, "is by another judge, theirs"),
        ({"against": ["main", "new"]}, "compares with c0, c1, not with new"),
        ({"verdicts": None}, "is no report of a gate that ended"),
    ],
)
def test_what_a_report_does_not_prove_is_said(
    changed: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=said):
        proven(tmp_path, monkeypatch, **changed)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ["same"]),
        ({"digest": "edited"}, ["same", "was edited while it was compared"]),
        ({"digest": "edited", "outcome": SLOWER}, ["slower"]),  # which says enough
        ({"ended": False}, ["same", "the run did not end$"]),
        ({"ended": False, "why": "Ctrl-C"}, ["same", "the run did not end: Ctrl-C"]),
        ({"outcome": None}, ["nothing was compared"]),
        ({"fails": True}, ["same", "could not be written: full"]),
        ({"status": 2}, ["same"]),
    ],
    ids=str,
)
def test_how_a_gate_concludes(
    fields: dict[str, Any], expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"digest": "tree", "outcome": SAME, "ended": True, "why": "", "status": 0, **fields}
    told: list[Any] = []
    written: list[int | None] = []

    def write(status: int | None) -> None:
        written.append(status)
        if "fails" in given:
            raise OSError("full")

    monkeypatch.setattr(gating, "tree_digest", lambda root, report: given["digest"])
    monkeypatch.setattr(
        gating, "report_verdict", lambda config, label, verdict: told.append(verdict)
    )
    made: Any = object.__new__(Gating)
    one = given["outcome"]
    made.verdicts = [("main", Verdict("x", one, one.title.lower()))] if one else []
    made.root, made.json, made.judged, made.config = tmp_path, tmp_path / "r.json", "tree", None
    made.ended, closed = given["ended"], []
    made.interruption = SimpleNamespace(ended=given["why"], close=lambda: closed.append(True))
    monkeypatch.setattr(made, "_write", write)
    session: Any = SimpleNamespace(exitstatus=given["status"], testscollected=3)
    made.conclude(session)
    assert [verdict for _, verdict in made.verdicts] == told
    assert len(told) == len(expected)
    for verdict, said in zip(told, expected, strict=True):
        assert re.search(said, verdict.text)
    assert written == [2 if given["status"] == 2 else None]
    assert session.testscollected == 3 + len(told)
    assert closed == [True]
    outcome = Outcome.MISSING if told[-1].outcome is Outcome.MISSING else given["outcome"]
    assert session.exitstatus == (2 if given["status"] == 2 else outcome.status)


@pytest.mark.parametrize(
    ("kernels", "pythons", "expected"),
    [
        ("own", ("3.12", "3.12"), "own"),
        ("own", ("3.11", "3.12"), ""),  # another Triton may be there
        (None, ("3.12", "3.12"), ""),
    ],
)
def test_the_candidate_alone_takes_kernels_of_the_base(
    kernels: str | None,
    pythons: tuple[str, str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: dict[str, dict[str, Any]] = {}
    monkeypatch.setattr(
        pair, "make_side", lambda worker, *given, **more: made.update({worker: more})
    )
    one: Any = object.__new__(pair.Pair)
    sides = (pair.BASE, pair.CANDIDATE)
    one.trees = {
        name: SimpleNamespace(kernels=kernels, python=python, slowed={}, usual={})
        for name, python in zip(sides, pythons, strict=True)
    }
    one.workers, one.device, one.registered = {name: name for name in sides}, None, None
    one.is_open, one.unstarted = False, None
    one._both = lambda make: [make(name) for name in sides]
    one.open()
    assert {name: made[name]["base_kernels"] for name in sides} == dict(
        zip(sides, ("", expected), strict=True)
    )
    assert all(made[name]["kernels"] == (kernels or "") for name in sides)
