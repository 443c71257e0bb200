"""The groups of a pytest session: what was measured of each, judged and saved when it ends.

A group is saved before the next one starts, so that a crash loses only what was being measured.
Its record is complete, and so may be a baseline, only if all of its tests ran and passed and no
verdict speaks against it. A test marked ``target`` compares what was measured with a bar: where it
fails the run fails, but the record stays complete and says what was missed.
"""

import os
import sys
import weakref
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from tinyllama.harness.gate.device_guard import WAIT, device_lock
from tinyllama.harness.machine import facts as machine
from tinyllama.harness.machine.progress import Progress, of_stream
from tinyllama.harness.plugins.suite import LEFT_OUT, covers, worker_device
from tinyllama.harness.records import results
from tinyllama.harness.records.entries import Entry, checked
from tinyllama.harness.records.results import Record
from tinyllama.harness.records.targets import Bar, Standing
from tinyllama.harness.records.verdict import (
    Outcome,
    Verdict,
    judge,
    unusable,
    worst,
)

SHORT = "short"  # as --groups: the set that a conftest declares
PHASES = {"setup", "call", "teardown"}


class NotMeasured(pytest.skip.Exception):  # type: ignore[name-defined]
    """What a test is about is not measured here, and the record of its group is whole without it:
    it says so itself, or has nothing to say about it."""

    __module__ = "builtins"  # pytest shows the name of the class alone


class NoBarApplies(NotMeasured):
    """None of the bars of a group is about this device, or can be told on it."""

    __module__ = "builtins"


@dataclass
class Group:
    """A group in this session: its test items, how they went, and its record once it began."""

    name: str
    items: set[str] = field(default_factory=set)
    slow: set[str] = field(default_factory=set)  # may be left out; must pass where they run
    phases: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    failed: set[str] = field(default_factory=set)
    skipped: dict[str, str] = field(default_factory=dict)  # item -> reason
    missed: list[str] = field(default_factory=list)  # what tests marked ``target`` say
    record: Record | None = None
    disturbed: str | None = None
    left: bool = False
    finished: bool = False

    def add(self, *entries: Entry) -> None:
        """Add measurements (`tinyllama.harness.records.entries`) to the record.

        Raises ValueError for a name that is taken, and for a figure that is none.
        """
        assert self.record is not None, f"group {self.name!r} has not begun"
        for entry in entries:
            if entry.name in self.record.by_name:
                raise ValueError(f"{entry.name!r} is measured twice: use another name")
            self.record.entries.append(checked(entry))

    def note(self, report: pytest.TestReport) -> None:
        """Note how a phase of a test went."""
        self.phases[report.nodeid].add(str(report.when))
        excuse: list[str] | None = getattr(report, "excuse", None)
        if excuse is not None:
            self.missed += excuse
        elif report.skipped:
            self.skipped[report.nodeid] = _reason(report)
        elif report.failed:
            self.failed.add(report.nodeid)

    @property
    def passed(self) -> bool:
        """Whether every phase that ran passed, missed a target or had none."""
        return not self.failed and not self.skipped

    def problems(self) -> list[Verdict]:
        """Why the group was not measured whole. A failed test is reported by pytest."""
        problems = [
            Verdict(item, Outcome.MISSING, f"SKIPPED: {reason}")
            for item, reason in self.skipped.items()
        ]
        not_slow = self.items - self.slow - self.failed - self.skipped.keys()
        if unrun := sorted(item for item in not_slow if self.phases[item] != PHASES):
            text = f"{len(unrun)} of its {len(self.items)} tests did not run: {unrun[0]}"
            problems.append(Verdict(self.name, Outcome.MISSING, text))
        if self.disturbed:
            problems.append(Verdict(self.name, Outcome.BUSY, self.disturbed))
        return problems


class Recording:
    """The groups of this session, and the verdicts on them."""

    def __init__(self, config: pytest.Config, root: Path, *, compare: bool) -> None:
        self.config = config
        self.compare = compare
        self.root = root
        self.ops = tuple(getattr(config.option, "op", ()))  # only these are compared; not recorded
        self.stored: list[Record] = []  # when the run began, oldest first
        self.declared: list[str] = []
        self.short: list[str] = []  # that --groups short measures
        self.expected: list[str] = []
        self.groups: dict[str, Group] = {}
        self.group_of: dict[str, str] = {}  # by node id
        self.current: str | None = None  # node id of the item that runs
        self.verdicts: list[tuple[str, Verdict]] = []  # with the group's name
        self.lines: list[str] = []
        self.progress, self.waits = beside_tests(), ""
        self.held, self._locks = set[torch.device](), ExitStack()

    @property
    def active(self) -> bool:
        """Whether this run is compared or recorded; otherwise it is only shown."""
        return self.compare or self.config.option.record

    @contextmanager
    def group(self, name: str, more: Sequence[torch.device] = ()) -> Iterator[Group]:
        """Measure a group. It is judged and saved after its last test.

        more: GPUs that it needs beside the session's.
        Raises ValueError for a group that nobody expects, or that was measured before.
        """
        state = self.groups.setdefault(name, Group(name))
        if state.record is not None:
            raise ValueError(f"group {name!r} is measured twice: measure it in one fixture only")
        if self.active and name not in self.expected:
            expected = ", ".join(self.expected) or "none"
            raise ValueError(f"group {name!r} is not expected here: expected are {expected}")
        device = worker_device(self.config)
        with self.progress:
            for gpu in (device, *more):
                self.hold_gpu(gpu)
            self.progress(f"{name}: compiling and measuring")
            state.record = results.new_record(device, name, self.config.rootpath)
            state.disturbed = machine.disturbance(device)
            yield state
            state.disturbed = state.disturbed or machine.disturbance(device)
            state.left = True
            if self.group_of.get(self.current or "") != name:  # else its teardown may still fail
                self.finish(state)

    def hold_gpu(self, device: torch.device) -> None:
        """Hold a GPU until the session ends: no other that times, and no gate, has it meanwhile. A
        CPU is not held: other work always shares it. Raises BusyError."""
        if device.type != "cpu" and device not in self.held:
            self._locks.enter_context(device_lock(device, WAIT, self._wait))
            self.held.add(device)

    def _wait(self, reason: str) -> None:
        if reason != self.waits:
            self.waits = reason
            self.progress.line(f"waiting up to {WAIT:.0f} s: {reason}")
        self.progress("waiting")

    # -- before the tests -------------------------------------------------------------------

    def collected(self, items: list[pytest.Item]) -> None:
        """Note which items belong to which group, before anything deselects them, and leave out
        those of groups that are not measured."""
        for item in items:
            name = _group_name(item) if covers(self.config, item) else None
            if name is not None:
                state = self.groups.setdefault(name, Group(name))
                state.items.add(item.nodeid)
                if item.get_closest_marker("slow"):
                    state.slow.add(item.nodeid)
                self.group_of[item.nodeid] = name
        hook = self.config.hook
        self.declared = _all_of(hook.pytest_tinyllama_groups(config=self.config))
        self.short = _all_of(hook.pytest_tinyllama_short_groups(config=self.config))
        self.expected = self._chosen()
        option = self.config.option.groups
        alone = {*self.short} - {*self.declared, *self.expected}
        left_out = dict.fromkeys(alone, f"a part of a group, measured with --groups {SHORT}")
        if option is not None:
            unnamed = self.groups.keys() - {*self.expected, *alone}
            left_out |= dict.fromkeys(unnamed, "not in --groups")
        if self.ops and self.active:
            op_of = {item: getattr(_parameter(item, "op"), "name", None) for item in items}
            about = {_group_name(item) for item in items if op_of[item] in self.ops}
            unrelated = {*self.expected, *self.groups} - about
            left_out |= dict.fromkeys(unrelated, f"--op: not about {', '.join(self.ops)}")
        self.expected = [name for name in self.expected if name not in left_out]
        _leave_out(self.config, items, left_out)

    def _chosen(self) -> list[str]:
        """The groups that ``--groups`` means, of those of this device."""
        option = self.config.option.groups
        if option is None:
            return self.declared
        names = self.short if option == SHORT else [name.strip() for name in option.split(",")]
        measurable = list(dict.fromkeys([*self.declared, *self.short]))
        if elsewhere := [name for name in names or [option] if name not in measurable]:
            raise pytest.UsageError(
                f"--groups names {', '.join(elsewhere)!r}, which is not measured on this device: "
                f"choose from {', '.join(measurable) or 'none'}"
            )
        return names

    # -- while they run ---------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Say in a report what excuses a test that did not pass: what it is about is not measured
        here, or it is a target, whose assertion says what is missed."""
        report = yield
        raised = call.excinfo
        if raised and issubclass(raised.type, NotMeasured):
            report.excuse = []  # type: ignore[attr-defined]
        target = call.when == "call" and item.get_closest_marker("target")
        if raised and raised.type is AssertionError and target:
            text = str(raised.value).partition("\nassert ")[0]  # pytest adds the expression
            report.excuse = [line.strip() for line in text.splitlines()]  # type: ignore[attr-defined]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = self.group_of.get(report.nodeid)
        if name is not None:
            self.groups[name].note(report)

    def hold(self, bars: Sequence[Bar]) -> None:
        """List the bars of the test that runs. It fails with those that are missed, and is skipped
        where none applies."""
        name = self.group_of.get(self.current or "", "")
        missed = [bar for bar in bars if bar.standing is Standing.MISSED]
        self.lines += [
            f"{bar.standing.value} {name}: {bar.text}"
            for bar in bars
            if bar not in missed  # the group says those when it is finished
        ]
        if all(bar.standing is Standing.NOT_APPLICABLE for bar in bars):
            raise NoBarApplies(f"none of {len(bars)} bars of {name} applies on this device")
        assert not missed, "\n".join(bar.text for bar in missed)

    # -- when a group, and when the session, has ended ----------------------------------------

    def finished(self) -> list[Record]:
        """The records of the groups that were measured to their end."""
        groups = self.groups.values()
        return [group.record for group in groups if group.finished and group.record]

    def finish_left(self) -> None:
        for state in self.groups.values():
            self.finish(state)

    def finish(self, state: Group) -> None:
        """Judge and save a group that was left."""
        record = state.record
        if record is None or not state.left or state.finished:
            return
        state.finished = True
        record.missed = state.missed
        self.lines += [f"MISSED {state.name}: {line}" for line in record.missed]
        if not self.active:
            record.complete = state.passed  # what the table says of it
            if state.disturbed:
                self.lines.append(f"{Outcome.BUSY.title} {state.name}: {state.disturbed}")
            return
        verdicts = state.problems()
        verdicts += judge(record, self._stored()) if self.compare else unusable(record)
        if any("::" in arg for arg in self.config.args):
            text = "tests were chosen one by one, perhaps not all: choose with --groups"
            verdicts.append(Verdict(state.name, Outcome.MISSING, text))
        self.verdicts += [(state.name, verdict) for verdict in verdicts]
        good = all(verdict.outcome.may_be_baseline for verdict in verdicts)
        record.complete = state.passed and good
        self._save(record)

    def _stored(self) -> list[Record]:
        """What was recorded; of the ops that are compared, where these are named."""
        if not self.ops:
            return self.stored
        meant = (None, *self.ops)
        return [
            replace(record, entries=[e for e in record.entries if getattr(e, "op", None) in meant])
            for record in self.stored
        ]

    def _save(self, record: Record) -> None:
        if self.ops:
            why = f": no baseline, since it is of {', '.join(self.ops)} alone"
        elif record.dirty:
            why = ": no baseline, since tracked files differ from the commit"
        else:
            why = "" if record.complete else ": no baseline, since it is not complete and good"
        if why and not self.config.option.record:
            self.lines.append(f"not recorded {record.group}{why}")
            return
        try:
            path = results.save(record, self.root)
            self.lines.append(f"recorded {path}{why}")
        except (OSError, ValueError) as error:
            text = f"it could not be recorded: {error}"
            self.verdicts.append((record.group, Verdict(record.group, Outcome.MISSING, text)))

    def conclude(self, session: pytest.Session) -> None:
        """At the end of the session: what never came, the reports, the exit status."""
        self._locks.close()
        status = session.exitstatus
        unable = (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERNAL_ERROR)
        if not self.active or status in unable:
            return
        if not self.declared:
            text = "no groups are declared: nothing is known to be measured here"
            self.verdicts.append(("groups", Verdict("groups", Outcome.MISSING, text)))
        for name in self.expected:
            state = self.groups.get(name, Group(name))
            if not state.finished:
                text = "expected, and not measured to its end"
                verdicts = [Verdict(name, Outcome.MISSING, text), *state.problems()]
                self.verdicts += [(name, verdict) for verdict in verdicts]
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if terminal and self.verdicts:
            terminal.ensure_newline()  # the progress of the tests is complete
        session.testscollected += len(self.verdicts)  # else the progress shown exceeds 100%
        for name, verdict in self.verdicts:
            report_verdict(self.config, name, verdict)
        outcome = worst(verdict.outcome for _, verdict in self.verdicts)
        if status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) and outcome.status:
            session.exitstatus = outcome.status
        if outcome.status:
            self.lines.append(
                f"exit status {int(session.exitstatus)}; "
                f"the worst verdict is {outcome.title} ({outcome.status})"
            )


def beside_tests() -> Progress:
    """The progress of a session whose tests take long. To be made before one runs: what is written
    to stdout while they do is captured."""
    try:
        descriptor = os.dup(sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):  # pytest within pytest has no descriptor
        return of_stream(sys.stdout)
    out = os.fdopen(descriptor, "w", errors="replace", closefd=False)
    weakref.finalize(out, os.close, descriptor)
    return of_stream(out, before="\n")


def _all_of(lists: Sequence[Sequence[str]]) -> list[str]:
    """Each name once, of what several conftests declare."""
    return list(dict.fromkeys(name for names in lists for name in names))


def _reason(report: pytest.TestReport) -> str:
    """Why an item was skipped, or was expected to fail."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return f"xfail {getattr(report, 'wasxfail', '')}".strip()


def _group_name(item: pytest.Item) -> str | None:
    group = _parameter(item, "group")
    return None if group is None else str(group)


def _parameter(item: pytest.Item, name: str) -> Any:
    return getattr(getattr(item, "callspec", None), "params", {}).get(name)


def _leave_out(config: pytest.Config, items: list[pytest.Item], why: dict[str, str]) -> None:
    dropped = [item for item in items if covers(config, item) and _group_name(item) in why]
    if dropped:
        items[:] = [item for item in items if item not in dropped]
        config.hook.pytest_deselected(items=dropped)
        config.stash[LEFT_OUT].update(why[str(_group_name(item))] for item in dropped)


def report_verdict(config: pytest.Config, group: str, verdict: Verdict) -> None:
    """Show a verdict as a test case: pytest counts it, and JUnit has it."""
    good = verdict.outcome.green
    report = pytest.TestReport(
        nodeid=f"compare::{group}::{verdict.name}",
        location=("compare", None, f"compare {verdict.name}"),
        keywords={},
        outcome="passed" if good else "failed",
        longrepr=None if good else str(verdict),
        when="call",
    )
    config.hook.pytest_runtest_logstart(nodeid=report.nodeid, location=report.location)
    config.hook.pytest_runtest_logreport(report=report)
