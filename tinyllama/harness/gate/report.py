"""The report of a gate: the file that proves a green run, and the summaries that people read.

An exit status of 0 proves nothing: an op may end its process with it. So the file names what was
judged and every benchmark that was expected, and is held to the checkout. Code that writes this
file itself is beyond it. msgspec stores NaN and infinity as null.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from tinyllama.harness.gate import waivers
from tinyllama.harness.gate.options import Options
from tinyllama.harness.gate.snapshots import Repository
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.machine.files import read_regular, replace_text
from tinyllama.harness.records.outcome import TO_DO, Outcome, worst

SCHEMA = 1
MOST_ALIKE = 8  # lines of what needs no reading; more are counted in one
REFERENCE = "eager"
_PROVED = (Outcome.WRONG_RESULT, Outcome.SLOWER)
_BY_TITLE = {outcome.title: outcome for outcome in Outcome}


class Line(msgspec.Struct, frozen=True):
    """A verdict. against: the label of the base."""

    against: str
    name: str
    outcome: str
    text: str

    @property
    def is_reference(self) -> bool:
        return self.name.split("-")[1:2] == [REFERENCE]

    @property
    def verdict(self) -> Outcome:
        return _BY_TITLE[self.outcome]

    def __str__(self) -> str:
        return f"{self.outcome:<12} {self.name}: {self.text}"


class Base(msgspec.Struct, frozen=True):
    """What was compared with. commit: empty where one tree ran under two interpreters. expected:
    the benchmarks that either side has; ended: whether the comparison did."""

    label: str
    commit: str
    python: str
    expected: list[str] = []
    ended: bool = False


class Report(msgspec.Struct):
    """All that a gate says.

    candidate: git's hash of the tree. only: the names of ops, and the files, that options chose.
    judge: whose harness. outputs: files in the checkout that the gate writes. protected: what the
    candidate changes of what judges. ended: why the gate ended early.
    """

    candidate: str
    judge: str
    device: str
    schema: int = SCHEMA
    status: int = 2
    ended: str = ""
    only: list[str] = []
    outputs: list[str] = []
    bases: list[Base] = []
    verdicts: list[Line] = []
    protected: list[str] = []
    deleted_tests: list[str] = []
    notes: list[str] = []
    comparisons: list[dict[str, Any]] = []

    def conclude(self) -> None:
        """Set the status from the verdicts: what is proved counts also where the gate ended."""
        if not self.verdicts and not self.ended:
            self.verdicts.append(line("gate", "gate", Outcome.MISSING, "nothing was compared"))
        outcome = worst(line.verdict for line in self.verdicts)
        self.status = 2 if self.ended and outcome not in _PROVED else outcome.status

    @property
    def missing(self) -> list[str]:
        """What keeps a report from being green although no verdict says so."""
        named = {(line.against, line.name) for line in self.verdicts}
        unended = [
            f"{base.label} was not compared to the end" for base in self.bases if not base.ended
        ]
        lost = [
            f"no verdict on {name} against {base.label}"
            for base in self.bases
            for name in base.expected
            if (base.label, name) not in named
        ]
        nothing = [] if self.bases and self.verdicts else ["nothing was compared"]
        return [*nothing, *unended, *lost]

    def write(self, path: Path) -> None:
        text = msgspec.json.format(msgspec.json.encode(self), indent=1)
        replace_text(path, text.decode() + "\n")

    # -- for people -------------------------------------------------------------------------

    def lines(self) -> list[str]:
        """The summary for a terminal, one line a verdict, what decides last."""
        lines = sorted(self.verdicts, key=lambda line: list(Outcome).index(line.verdict))
        several = len(self.bases) > 1
        first = []
        for outcome in (Outcome.IDENTICAL, Outcome.NOT_DECIDED):
            alike = [line for line in lines if line.verdict is outcome]
            if len(alike) > MOST_ALIKE:
                lines = [line for line in lines if line.verdict is not outcome]
                first.append(f"{outcome.title:<12} {len(alike)} benchmarks: {alike[0].text}")
        texts = [f"against {line.against}: {line}" if several else str(line) for line in lines]
        return [*first, *texts, *self.remarks()]

    def remarks(self) -> list[str]:
        """What is said beside the verdicts."""
        outcome = worst(line.verdict for line in self.verdicts)
        advised = outcome in TO_DO and not (self.ended and outcome is Outcome.NOT_DECIDED)
        return [
            *(
                f"changed; any new entry holds: {name}"
                if name == waivers.FILE
                else f"changed, and the base's judged: {name}"
                for name in self.protected
            ),
            *(f"deleted test: {name}" for name in self.deleted_tests),
            *self.notes,
            *([f"the gate did not end: {self.ended}"] if self.ended else []),
            f"{self.counted()}; judged by {self.judge} on {self.device}",
            *([f"what to do: {TO_DO[outcome]}"] if advised else []),
        ]

    def counted(self) -> str:
        """How many verdicts there are of each outcome, references apart from candidates."""
        parts = []
        for of, title in ((False, ""), (True, "references: ")):
            counts = Counter(line.verdict for line in self.verdicts if line.is_reference is of)
            if counts:
                words = ", ".join(f"{counts[o]} {o.title}" for o in Outcome if counts[o])
                parts.append(f"{title}{words}")
        return "; ".join(parts) + f": status {self.status}"

    def markdown(self) -> str:
        """For a comment on a pull request."""
        differing = [line for line in self.verdicts if line.verdict is not Outcome.IDENTICAL]
        rows = (
            f"| {line.outcome} | `{line.name}` | {line.text.replace('|', '/')} |".replace("\n", " ")
            for line in differing
        )
        table = ["| verdict | benchmark | figures |", "|---|---|---|", *rows] if differing else []
        rest = [f"- {text}" for text in self.remarks()]
        return "\n".join([f"**Gate: {self.counted()}**", "", *table, "", *rest]) + "\n"


def read(path: Path) -> Report:
    """Raises UsageError for what is no report of this version."""
    try:
        report = msgspec.json.decode(read_regular(path), type=Report)
        if report.schema != SCHEMA:
            raise ValueError(f"its schema is {report.schema}, not {SCHEMA}")
        if unknown := {line.outcome for line in report.verdicts} - set(_BY_TITLE):
            raise ValueError(f"{sorted(unknown)[0]!r} is no outcome")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} is no report of a gate that ended: {error}: gate again"
        ) from error
    return report


def verify(path: Path, repository: Repository, options: Options) -> str:
    """What a green report says, in one line. Raises UsageError for a report that is not green, or
    of another tree, base, device or ops."""
    report = read(path)
    bad = sorted({line.outcome for line in report.verdicts if not line.verdict.green})
    problems = [*bad, *report.missing, *filter(None, [report.ended])]
    if problems or report.status:
        raise UsageError(f"{path} is not green: status {report.status}, {', '.join(problems[:3])}")
    repository.reports = [*dict.fromkeys([*repository.reports, *report.outputs])]
    if report.candidate != repository.of_working_tree():
        raise UsageError(f"{path} is of another tree than {repository.root}: gate this one")
    if options.device and report.device.partition(" ")[0] != options.device.partition(":")[0]:
        raise UsageError(f"{path} is of {report.device}, not of {options.device}: gate there")
    chosen = {*options.op, *options.ops}
    if report.only and not (chosen and chosen <= {*report.only}):
        only = ", ".join(report.only)
        raise UsageError(f"{path} compares {only} alone: gate all, or add the same --op and --ops")
    commits = {base.commit for base in report.bases}
    for revision in options.against:
        if (commit := repository.resolve(revision)) not in commits:
            compared = ", ".join(base.label for base in report.bases)
            raise UsageError(f"{path} compares with {compared}, not with {revision} ({commit})")
    labels = ", ".join(base.label for base in report.bases)
    return f"{len(report.verdicts)} verdicts against {labels}, all green, of this tree"


def write_summary(report: Report, options: Options) -> None:
    """The summary for a comment, if options ask for it."""
    if options.summary_markdown:
        replace_text(Path(options.summary_markdown), report.markdown())


def line(against: str, name: str, outcome: Outcome, text: str) -> Line:
    return Line(against, name, outcome.title, text)
