"""The pytest plugin for timings: records, the ladder, and the comparison with a baseline.

pytest-benchmark stays the fixture and the table. The verdict is ours, because its own fails
open: a benchmark that is new or missing passes, and under xdist nothing is timed and all is
green. Here the set measured must be the set expected, and what cannot be compared has an
exit status of its own, above pytest's.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest

from tinyllama.harness import results
from tinyllama.harness.plugin import worker_device
from tinyllama.harness.report import ladder, ladder_rows

SLOWER_THAN = 1.05  # ratio of medians, with quartiles apart: what a stored baseline can tell


class Status(IntEnum):
    """Outcomes of a comparison; the worst wins. pytest itself uses 0 to 5."""

    SAME = 0
    SLOWER = 10
    NO_BASELINE = 12
    OTHER_VERSIONS = 13
    MISSING = 15


class Timings:
    """The record of this session, and the verdict on it."""

    def __init__(self, config: pytest.Config, compare: bool) -> None:
        self.root = Path(config.option.results_dir or config.rootpath / "results")
        self.save = config.option.record
        self.compare = compare
        self.record = results.new_record(worker_device(config))
        self.lines: list[str] = []

    def finish(self, *, passed: bool) -> Status:
        """Compare and save. A record with a failure in it never becomes a baseline."""
        self.record.complete = passed and bool(self.record.entries)
        status = Status.SAME
        if self.compare and passed:
            status = self.judge() if self.record.entries else Status.MISSING
            if not self.record.entries:
                self.lines.append("MISSING everything: nothing was timed")
        if self.record.complete and (self.save or (self.compare and status != Status.SLOWER)):
            path = results.save(self.record, self.root)
            self.lines.append(f"recorded {path}")
        return status

    def judge(self) -> Status:
        before = [r for _, r in results.records(self.root, self.record.device) if r.complete]
        same = [r for r in before if r.same_setting(self.record)]
        if not before:
            self.lines.append(f"NO BASELINE for {self.record.device}: this run is recorded as one")
            return Status.NO_BASELINE
        if not same:
            self.lines.append(
                f"OTHER VERSIONS: the last record has {before[-1].versions}; "
                "this run is recorded as the baseline of its own"
            )
            return Status.OTHER_VERSIONS
        return self.against(same[-1])

    def against(self, baseline: results.Record) -> Status:
        """Each timing against the baseline's; missing and new ones are named."""
        status = Status.SAME
        now, then = (
            {name: e for name, e in record.by_name.items() if "seconds" in e}
            for record in (self.record, baseline)
        )
        for name in sorted(set(then) - set(now)):
            self.lines.append(
                f"MISSING {name}: in the baseline of {baseline.date}, not in this run"
            )
            status = max(status, Status.MISSING)
        for name, entry in now.items():
            if name not in then:
                self.lines.append(f"NEW {name}: nothing to compare with yet")
                continue
            times = entry["seconds"] / then[name]["seconds"]
            apart = entry["seconds_quartiles"][0] > then[name]["seconds_quartiles"][1]
            slower = apart and times > SLOWER_THAN
            self.lines.append(f"{'SLOWER' if slower else 'SAME'} {name}: {times:.3f} times as long")
            status = max(status, Status.SLOWER) if slower else status
        return status


TIMINGS = pytest.StashKey[Timings]()
PASSED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tinyllama")
    group.addoption("--results-dir", help="folder of the records (default: results/)")
    group.addoption("--record", action="store_true", help="save this run's timings as a record")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    compare = bool(getattr(config.option, "benchmark_compare", None))
    if compare:
        config.option.benchmark_compare = None  # the verdict is ours, not pytest-benchmark's
        if getattr(config.option, "dist", "no") != "no":
            raise pytest.UsageError(
                "--benchmark-compare with xdist times nothing: run it without -n"
            )
        if config.option.benchmark_disable or config.option.benchmark_skip:
            raise pytest.UsageError("--benchmark-compare with benchmarks disabled times nothing")
    config.stash[TIMINGS] = Timings(config, compare)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[PASSED] = report.passed
    return report


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Iterator[Callable[..., None]]:
    """``record(name, **values)`` adds a measurement to the run's record.

    A measurement of a test that then fails is kept, and marked.
    """
    entries: list[dict[str, Any]] = []
    yield lambda name, **values: entries.append({"name": name, **values})
    passed = request.node.stash.get(PASSED, False)
    request.config.stash[TIMINGS].record.entries += [{**e, "passed": passed} for e in entries]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    timings = session.config.stash[TIMINGS]
    if not timings.record.entries and not timings.compare:
        return
    status = timings.finish(passed=session.exitstatus == 0)
    if status:
        session.exitstatus = int(status)
        timings.lines.append(f"exit status {int(status)}: {status.name.replace('_', ' ')}")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    timings = config.stash[TIMINGS]
    if ladder_rows(timings.record):
        terminalreporter.section("ladder")
        for line in ladder(timings.record):
            terminalreporter.line(line)
    for line in timings.lines:
        terminalreporter.line(line)
