"""The process that judges: it compares, and writes the report. `command` starts it.

``python -m tinyllama.harness.gate.judge_process TASK.json``, with the judge's harness on the path
and an empty current folder: nothing of the candidate is imported here. Ctrl-C and SIGTERM are
blocked until it can report what they ended.
"""

import os
import sys
from pathlib import Path

import msgspec
import torch

from tinyllama.harness.gate import report, snapshots, workspace
from tinyllama.harness.gate.cancel import Interruption
from tinyllama.harness.gate.device_guard import DeviceGuard
from tinyllama.harness.gate.options import Options
from tinyllama.harness.gate.report import Base, Report
from tinyllama.harness.gate.setting import Stages
from tinyllama.harness.gate.snapshots import Repository, scratch
from tinyllama.harness.machine.device import default_device, device_name, usable_device
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.machine.progress import Progress, of_stream
from tinyllama.harness.machine.worker import end_with
from tinyllama.harness.records.verdict import Outcome, Verdict

REFUSED = 2  # as of any option that cannot be used


class Task(msgspec.Struct, frozen=True):
    """What `command` asks a judge for. judge: the label of its harness. report: where it goes.
    began: when the command did, by `time.monotonic`."""

    options: Options
    judge: str
    report: str
    began: float


class Gate:
    """The comparisons of a task, one base after another."""

    def __init__(self, task: Task, repository: Repository, progress: Progress) -> None:
        self.task, self.options, self.repository = task, task.options, repository
        self.progress = progress
        chosen = task.options.device
        self.device = usable_device(chosen) if chosen else default_device()
        self.interruption = Interruption(task.options.time_limit)
        self.report = Report(
            repository.of_working_tree(),
            task.judge,
            f"{self.device.type} ({device_name(self.device)})",
            only=[*task.options.op, *task.options.ops],
            outputs=repository.reports,
        )

    def run(self) -> None:
        """Compare with every base; what ends this early is in the report."""
        seconds = Stages()
        try:
            self.interruption.begin(self.task.began)
            with self.progress:
                for revision, python in self.options.comparisons:
                    self._against(revision, python, seconds)
        except KeyboardInterrupt:
            self.report.ended = self.interruption.ended or "Ctrl-C"
        except UsageError as error:
            self._say("gate", "gate", Outcome.NOT_JUDGED, str(error))
        self.interruption.ignore()
        if self.repository.of_working_tree() != self.report.candidate:
            text = f"{self.repository.root} was edited while it was compared: compare it again"
            self._say("gate", "candidate", Outcome.NOT_JUDGED, text)
        self.report.conclude()

    def _against(self, revision: str | None, python: str, seconds: Stages) -> None:
        commit = None if revision is None else self.repository.resolve(revision)
        label = " ".join(filter(None, [revision, python if python != sys.executable else ""]))
        base = Base(label, commit or "", python)
        self.report.bases.append(base)
        unwatched = self.options.unwatched
        try:
            with (
                scratch() as folder,
                DeviceGuard(self.device, unwatched=unwatched, waiting=self._wait) as guard,
            ):
                with workspace.prepared(
                    self.repository,
                    self.options,
                    base,
                    self.report.candidate,
                    folder=folder,
                    guard=guard,
                    seconds=seconds,
                    progress=self.progress,
                ) as prepared:
                    self._compare(prepared, base, folder)
                if guard.holds and (disturbed := guard.after()):
                    self._say(label, "device", Outcome.BUSY, disturbed)
                if guard.holds and guard.unreadable:
                    self.report.notes.append(f"nothing watched the device: {guard.unreadable}")
        except (UsageError, OSError) as error:
            self._say(label, "comparison", Outcome.NOT_JUDGED, str(error))
        except ValueError as error:
            text = workspace.without_folders(str(error), folder, label)
            self._say(label, "configuration", Outcome.MISSING, text)

    def _compare(self, prepared: workspace.Prepared, base: Base, folder: Path) -> None:
        session, ended, verdicts = prepared.session, False, list[Verdict]()
        try:
            verdicts = session.run()
            ended = True
        except BaseException as error:
            why = self.interruption.ended
            if not (why or isinstance(error, KeyboardInterrupt)):
                raise
            verdicts = session.interrupted(why or "Ctrl-C")
            raise KeyboardInterrupt(why) from error  # what killed processes led to is no result
        finally:
            expected = [*session.compared, *session.new]
            self.report.bases[-1] = msgspec.structs.replace(base, expected=expected, ended=ended)
            for verdict in verdicts:
                text = workspace.without_folders(verdict.text, folder, base.label)
                self._say(base.label, verdict.name, verdict.outcome, text)
            self.report.comparisons.append({"against": base.label, **session.report()})
            self._note(prepared)

    def _note(self, prepared: workspace.Prepared) -> None:
        session, report = prepared.session, self.report
        for noted, names in (
            (report.protected, [*prepared.protected, *session.changed]),
            (report.deleted_tests, prepared.deleted_tests),
        ):
            noted += [name for name in names if name not in noted]
        if prepared.change.benchmarks and (files := sorted(prepared.change.everything())):
            report.notes.append(
                f"everything is timed: no op imports {', '.join(files[:3])}, and no pattern of "
                "`unrelated` in the base's pyproject.toml names it"
            )
        stages = ", ".join(f"{name} {taken:.0f} s" for name, taken in session.seconds.items())
        report.notes.append(f"{stages}; {session.launched} blocks, {session.discarded} discarded")

    def _say(self, against: str, name: str, outcome: Outcome, text: str) -> None:
        self.report.verdicts.append(report.line(against, name, outcome, text))

    def _wait(self, reason: str) -> None:
        self.progress(f"waiting for the device: {reason}")


def main(path: str) -> int:
    """The exit status of a gate; its report is written whatever happens, unless the command is
    killed: nobody would read it, and the device would be held."""
    end_with(os.getppid())
    task = msgspec.json.decode(Path(path).read_bytes(), type=Task)
    torch.set_num_threads(1)
    with snapshots.opened(Path(task.options.tree or "."), task.options.reports) as repository:
        try:
            gate = Gate(task, repository, of_stream(sys.stdout))
        except UsageError as error:  # no such device: `command` needs no torch, and cannot tell
            print(f"tinyllama: error: {error}", file=sys.stderr)
            return REFUSED
        try:
            gate.run()
        finally:
            gate.report.write(Path(task.report))
    return gate.report.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
