"""What a session of the gate compares: one base after another, and what it reports of them.

The hooks and options of pytest are in `gate`.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import tinyllama
from tinyllama.harness.gate import judge
from tinyllama.harness.gate.asked import Asked
from tinyllama.harness.gate.benchmarks import Registered
from tinyllama.harness.gate.comparison import Request, UnreadableError, prepared
from tinyllama.harness.gate.device_guard import BusyError, DeviceGuard, device_lock
from tinyllama.harness.gate.interrupted import Interruption
from tinyllama.harness.gate.proof import tree_digest
from tinyllama.harness.gate.revision import RevisionError, tree_of
from tinyllama.harness.gate.stages import Stages, age, began
from tinyllama.harness.machine.device import device_name
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.machine.files import replace_text
from tinyllama.harness.plugins.benchmarks import team_of
from tinyllama.harness.plugins.recording import report_verdict
from tinyllama.harness.plugins.showing import of_session
from tinyllama.harness.plugins.suite import worker_device
from tinyllama.harness.records import results
from tinyllama.harness.records.outcome import TO_DO
from tinyllama.harness.records.verdict import Outcome, Verdict, worst

WAIT = 180.0  # seconds for another gate to end, and for the machine to become idle


class Gating:
    """The comparisons of a session, and their verdicts.

    Raises pytest.UsageError for options that cannot be used.
    """

    def __init__(self, config: pytest.Config) -> None:
        option = config.option
        self.config = config
        self.device = worker_device(config)
        self.team = team_of(config, option.tree)
        self.json = Path(option.gate_json) if option.gate_json else None
        self.ops = tuple(getattr(option, "op", ()))  # the only ones that are compared
        try:
            self.root = Path(tree_of(Path(option.tree or config.rootpath)))
            self.asked = asked_of(config, self.root)
            self.commits = self.asked.check()
        except (UsageError, RevisionError) as error:
            raise pytest.UsageError(str(error)) from error
        self.interpreters = [Path(name) for name in option.against_env]
        self.verdicts: list[tuple[str, Verdict]] = []  # with the base's label
        self.reports: list[dict[str, Any]] = []
        self.unreadable: str | None = None  # why the load cannot be read
        self.ended = False
        self.judged = ""  # a digest of the candidate's tree
        self.stages = Stages()  # seconds before the next comparison
        self.interruption = Interruption()
        self.waits = ""
        self.judge = option.judge or str(judge.HARNESS)  # whose harness this is

    def run(self) -> None:
        """Compare with one base after another while holding the device."""
        self.progress = of_session(self.config)  # the terminal is not there when plugins start
        self.registered = self._registered()
        try:
            self.asked.check_ops(self.commits.values(), self.registered.own is not None)
        except UsageError as error:
            raise pytest.UsageError(str(error)) from error
        self.judged = tree_digest(self.root, self.json)
        self.stages["start"] = time.monotonic() - began()
        self.stages["start: the judge's process"] = age()
        limit = self.config.option.time_limit
        left = None if limit is None else limit - self.stages["start"]
        self.interruption.open(left, limit)
        try:
            with self.progress, device_lock(self.device, WAIT, self._wait):
                for rev, commit in self.commits.items():
                    self._against(rev, commit, sys.executable)
                for python in self.interpreters:
                    self._against(str(python), None, str(python))
        except BusyError as error:
            self.verdicts.append(("device", Verdict("device", Outcome.BUSY, str(error))))
        self.ended = True

    def _registered(self) -> Registered:
        """What one conftest registered. Raises pytest.UsageError for none, and for several."""
        found = self.config.hook.pytest_tinyllama_benchmarks(config=self.config)
        if len(found) != 1:
            raise pytest.UsageError(
                f"{len(found)} conftests implement pytest_tinyllama_benchmarks, which says what "
                "the gate compares: name the one folder of timings that is gated"
            )
        registered: Registered = found[0]
        return registered

    def _against(self, label: str, commit: str | None, python: str) -> None:
        if commit is not None and self.root.resolve() == judge.HARNESS:
            text = (
                f"{self.judge} is the candidate's own harness, whose verdict is shown and never "
                "green: name a harness that you trust with --judge, or a newer base"
            )
            self.verdicts.append((label, Verdict("judge", Outcome.JUDGE_CHANGED, text)))
        watch = DeviceGuard(self.device)
        if watch.unreadable and not self.config.option.unwatched:
            text = (
                f"load and throttling cannot be read: {watch.unreadable}; fix that, or add "
                "--unwatched"
            )
            self.verdicts.append((label, Verdict("device", Outcome.BUSY, text)))
            return
        self.unreadable = watch.unreadable
        with self.stages.of("wait"):
            disturbed = watch.wait_until_idle(WAIT, self._wait)
        if disturbed:
            self.verdicts.append((label, Verdict("device", Outcome.BUSY, disturbed)))
            return
        stages, self.stages = self.stages, Stages()
        try:
            request = Request(
                registered=self.registered,
                root=self.root,
                label=label,
                commit=commit,
                python=python,
                device=self.device,
                results=self._results(),
                version=own.version if (own := self.registered.own) else tinyllama.__version__,
                watch=watch,
                candidate_label=results.current_commit(self.root),
                all_verdicts=self.config.option.all_verdicts,
                ops=self.ops,
                seconds=stages,
                say=self.progress.line,
                doing=self.progress,
            )
            with prepared(request) as session:
                ended = False
                try:
                    verdicts = session.run()
                    ended = True
                except BaseException as error:
                    why = self.interruption.ended
                    if not (why or isinstance(error, KeyboardInterrupt)):
                        raise
                    self.verdicts += [(label, one) for one in session.interrupted(why or "Ctrl-C")]
                    raise KeyboardInterrupt(why) from error  # what killed processes led to is none
                finally:  # keep what was measured until an error
                    self.reports.append({"against": label, "ended": ended, **session.report()})
        except UnreadableError as error:
            verdicts = [Verdict("candidate", Outcome.JUDGE_CHANGED, str(error))]
        except (RevisionError, OSError) as error:
            verdicts = [Verdict(label, Outcome.NO_BASE, str(error))]
        except ValueError as error:
            verdicts = [Verdict(label, Outcome.MISSING, str(error))]
        if disturbed := watch.after():
            verdicts.append(Verdict("device", Outcome.BUSY, disturbed))
        self.verdicts += [(label, verdict) for verdict in verdicts]

    def _results(self) -> Path | None:
        """Where A/A blocks are: never in the candidate, unless the user says so."""
        if given := self.config.option.results_dir:
            return Path(given)
        return None if self.registered.own else judge.HARNESS / "results"

    def conclude(self, session: pytest.Session) -> None:
        """Report the verdicts and set the exit status, unless pytest's own is neither 0 nor 5."""
        status = session.exitstatus
        if not self.ended or not self.verdicts:
            ended = self.interruption.ended
            why = f"the run did not end: {ended}" if ended else "the run did not end"
            text = why if not self.ended else "nothing was compared"
            self.verdicts.append(("gate", Verdict("gate", Outcome.MISSING, text)))
        green = self.ended and all(verdict.outcome.green for _, verdict in self.verdicts)
        if green and tree_digest(self.root, self.json) != self.judged:
            text = f"{self.root} was edited while it was compared: compare it again"
            self.verdicts.append(("gate", Verdict("gate", Outcome.MISSING, text)))
        ours = status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        try:
            self._write(None if ours else int(status))
        except OSError as error:
            text = f"{self.json} could not be written: {error}"
            self.verdicts.append(("gate", Verdict("gate", Outcome.MISSING, text)))
        session.testscollected += len(self.verdicts)
        for label, verdict in self.verdicts:
            report_verdict(self.config, label, verdict)
        self.interruption.close()
        if ours:
            session.exitstatus = worst(verdict.outcome for _, verdict in self.verdicts).status

    def _write(self, status: int | None) -> None:
        """Write the report, however the run ended."""
        if self.json is None:
            return
        found = worst(verdict.outcome for _, verdict in self.verdicts)
        content = {
            "status": found.status if status is None else status,
            "verdicts": [
                {"against": label, "name": v.name, "outcome": v.outcome.title, "text": v.text}
                for label, v in self.verdicts
            ],
            "comparisons": self.reports,
            "judge": self.judge,
            "device": f"{self.device.type} ({device_name(self.device)})",
            "only": list(self.ops),
            "candidate": self.judged,
            "bases": {**self.commits, **{str(path): str(path) for path in self.interpreters}},
        }
        replace_text(self.json, json.dumps(content, indent=1) + "\n")

    def lines(self) -> list[str]:
        each = [
            f"against {label}: {verdict}"
            for label, verdict in self.verdicts
            if verdict.outcome is not Outcome.IDENTICAL
        ]
        if self.unreadable:
            each.append(f"unwatched, since load and throttling cannot be read: {self.unreadable}")
        if self.ops:
            each.append(f"--op: no other ops than {', '.join(self.ops)} were compared")
        for of in (_changed, _unidentified):
            each += list(dict.fromkeys(line for report in self.reports for line in of(report)))
        first = [self.counted(), f"judged by {self.judge}", *self.team.lines()]
        to_do = TO_DO.get(worst(verdict.outcome for _, verdict in self.verdicts))
        advice = [f"what to do: {to_do} (docs/CI.md)"] if to_do else []
        return [*first, *each, *advice, *map(_effort, self.reports)]

    def counted(self) -> str:
        """How many verdicts there are of each outcome, and the worst."""
        counts = Counter(verdict.outcome for _, verdict in self.verdicts)
        shown = ", ".join(f"{counts[o]} {o.title}" for o in Outcome if counts[o])
        outcome = worst(counts)
        return f"{shown}; the worst verdict is {outcome.title} ({outcome.status})"

    def _wait(self, reason: str) -> None:
        """Say once why nothing happens, and show for how long."""
        if reason != self.waits:
            self.waits = reason
            self.progress.line(f"waiting up to {WAIT:.0f} s: {reason}")
        self.progress("waiting")


def asked_of(
    config: pytest.Config, root: Path, here: Path | None = None, paths: Sequence[str] = ()
) -> Asked:
    """What the options ask for. paths: of folders of timings, relative to ``here``."""

    def place(name: str) -> Path | None:
        given = getattr(config.option, name, None)
        return Path(given) if given else None

    option = config.option
    return Asked(
        root=root,
        here=here or root,
        against=option.against,
        interpreters=option.against_env,
        paths=paths,
        files=getattr(option, "ops", ()),
        ops=getattr(option, "op", ()),
        device=getattr(option, "device", None),
        results=place("results_dir"),
        report=place("gate_json"),
        junit=place("xmlpath"),
    )


def _changed(report: Mapping[str, Any]) -> list[str]:
    """What the candidate changed, and the base's decided."""
    return [
        f"changed, and the base's judged: {one['name']} ({one['digest']})"
        for one in report["judge_changed"]
    ]


def _unidentified(report: Mapping[str, Any]) -> list[str]:
    """Why benchmarks whose source is the same were compared: each reason, and how many."""
    reasons = Counter(report["unidentified"].values())
    return [f"not IDENTICAL: {n} benchmarks: {why}" for why, n in reasons.most_common()]


def _effort(report: Mapping[str, Any]) -> str:
    """The providers that a comparison left out, and the seconds of its stages."""
    out = "".join(f"{n} providers not timed: {why}; " for why, n in report["left_out"].items())
    whole = ((name, seconds) for name, seconds in report["seconds"].items() if ": " not in name)
    stages = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in whole)
    blocks = f"{report['blocks']} blocks, {report['discarded']} of them discarded"
    return f"against {report['against']}: {out}{stages}; {blocks}"
