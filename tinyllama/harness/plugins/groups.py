"""A group in a pytest session: its tests, how they went, and what was measured of it."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from tinyllama.harness.records.entries import Entry
from tinyllama.harness.records.results import Record
from tinyllama.harness.records.verdict import Outcome, Verdict, check_tolerances

PHASES = {"setup", "call", "teardown"}


class GroupRecord:
    """The record of a group while its tests add to it. usual: the tolerances of entries, where
    they state none of a metric."""

    def __init__(self, record: Record, usual: Mapping[str, float] | None = None) -> None:
        self.record, self.usual = record, dict(usual or {})

    def add(self, *entries: Entry) -> None:
        """Add measurements (`tinyllama.harness.records.entries`).

        Raises ValueError for a name that is taken, or a tolerance that is not one.
        """
        for entry in entries:
            if entry.name in self.record.by_name:
                raise ValueError(f"{entry.name!r} is measured twice: use another name")
            check_tolerances(entry)
            if self.usual:
                entry = replace(entry, tolerances={**self.usual, **(entry.tolerances or {})})
            self.record.entries.append(entry)


@dataclass
class Group:
    """A group in this session: its test items, how they went, and its record once it began."""

    name: str
    items: set[str] = field(default_factory=set)
    slow: set[str] = field(default_factory=set)  # may be skipped; must pass where they run
    targets: set[str] = field(default_factory=set)  # say which bars the record misses
    reports: dict[str, list[pytest.TestReport]] = field(default_factory=lambda: defaultdict(list))
    measured: GroupRecord | None = None
    disturbed: str | None = None
    broken: str | None = None  # the test that reports why it could not be measured
    left: bool = False
    finished: bool = False

    @property
    def unrun(self) -> list[str]:
        """Items that neither failed nor finished: deselected, or the run ended before."""
        return [
            item
            for item in sorted(self.items - self.slow)
            if all(report.passed for report in self.reports[item])
            and {report.when for report in self.reports[item]} != PHASES
        ]

    @property
    def passed(self) -> bool:
        """Whether every phase that ran passed, missed a target or had none; what did not run is
        in `problems`."""
        each = [report for reports in self.reports.values() for report in reports]
        return all(
            report.outcome == "passed" or self._misses(report) or _whole_without(report)
            for report in each
        )

    @property
    def missed(self) -> list[str]:
        """The lines in which tests marked ``target`` say what was missed."""
        return [
            line
            for item in sorted(self.targets)
            for report in self.reports[item]
            for line in self._misses(report)
        ]

    def _misses(self, report: pytest.TestReport) -> list[str]:
        """What a report says was missed; nothing where it failed otherwise."""
        if report.nodeid not in self.targets or report.passed:
            return []
        said = getattr(report, "missed", "").partition("\nassert ")[0]  # pytest adds the expression
        return [line.strip() for line in said.splitlines()]

    def problems(self) -> list[Verdict]:
        """Why the group was not measured whole. A failed test is reported by pytest."""
        found = [
            Verdict(item, Outcome.MISSING, f"SKIPPED: {_reason(report)}")
            for item, reports in self.reports.items()
            for report in reports
            if report.skipped and not _whole_without(report) and not self._misses(report)
            if not getattr(report, "unmeasured", False)
        ]
        if self.broken:
            text = f"it could not be measured: {self.broken} says why"
            found.append(Verdict(self.name, Outcome.MISSING, text))
        elif self.unrun:
            text = f"{len(self.unrun)} of its {len(self.items)} tests did not run: {self.unrun[0]}"
            found.append(Verdict(self.name, Outcome.MISSING, text))
        if self.disturbed:
            found.append(Verdict(self.name, Outcome.BUSY, self.disturbed))
        return found


def _whole_without(report: pytest.TestReport) -> bool:
    """Whether what a test is about is not measured here, and need not be: see `NotMeasured`."""
    return getattr(report, "not_measured", False)


def _reason(report: pytest.TestReport) -> str:
    """Why an item was skipped, or was expected to fail."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return f"xfail {getattr(report, 'wasxfail', '')}".strip()
