"""Checks in a process of their own: what ends that process is a finding, and the rest goes on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tinyllama.harness.correct.checks import Candidate, Finding, Outcome, accuracy, run
from tinyllama.harness.correct.checks.crash import place_in
from tinyllama.harness.declare.registry import discover, load_file
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.machine.worker import Worker, WorkerError


@dataclass(frozen=True)
class Asked:
    """What is checked, on a device, with inputs from a seed: the providers that a file declares, or
    those of an op of the tree or of an installed package; of these the one of a name.

    package: has the ops of the tree, on which the file may register providers.
    """

    package: str
    file: str | None
    op: str | None
    provider: str | None
    device: str
    seed: int


class Checks:
    """In the worker: the providers that are asked about, and the checks on them."""

    def __init__(self, **asked: object) -> None:
        self.asked = Asked(**asked)  # type: ignore[arg-type]
        self.candidates = {
            str(one.provider): one
            for one in self._declared()
            if self.asked.provider in (None, one.provider.name)
        }

    def _declared(self) -> Iterator[Candidate]:
        """Raises UsageError for a name that is not declared; the message has those that are."""
        asked, ops = self.asked, discover(self.asked.package)
        before: set[str] = set()
        if asked.file is not None:
            before = {str(provider) for op in ops.values() for provider in op.providers.values()}
            load_file(asked.file, ops)
        elif asked.op not in ops:
            raise UsageError(_unknown("--op", asked.op, ops))
        found = [
            Candidate(op, provider, torch.device(asked.device), asked.seed)
            for op in ops.values()
            if asked.op in (None, op.name)
            for provider in op.providers.values()
            if str(provider) not in before
        ]
        names = dict.fromkeys(one.provider.name for one in found)
        if names and asked.provider not in (None, *names):
            raise UsageError(_unknown("--provider", asked.provider, names))
        yield from found

    def providers(self) -> list[str]:
        return list(self.candidates)

    def findings(self, provider: str, only: list[str], right: bool) -> list[Finding]:
        return list(run(self.candidates[provider], only, right=right))


def check(asked: Asked, only: Sequence[str]) -> Iterator[tuple[str, list[Finding]]]:
    """Each provider that is asked about, and the findings of these checks on it.

    Raises WorkerError when the file cannot be loaded, or has no such op or provider.
    """
    together = [name for name in only if name in accuracy.NAMES]
    groups = [*([together] if together else []), *([n] for n in only if n not in together)]
    worker: Worker | None = None
    try:
        worker = _started(asked)
        for provider in worker.call("checks", "providers"):
            found: list[Finding] = []
            for names in groups:
                right = all(one.outcome.good for one in found if one.check in accuracy.PLAIN)
                try:
                    found += worker.call("checks", "findings", provider, names, right)
                except WorkerError as error:  # the process ended: the next check gets a new one
                    found += [_ended(name, error, asked.file) for name in names]
                    worker.close()
                    worker = _started(asked)
            yield provider, found
    finally:
        if worker is not None:
            worker.close()


def _ended(check: str, error: WorkerError, file: str | None) -> Finding:
    place = "" if file is None else place_in(error.details, str(Path(file).resolve()))
    return Finding(check, Outcome.CRASHED, message=f"{place}{error}", traceback=error.details)


def _unknown(option: str, name: str | None, known: Iterable[str]) -> str:
    return f"{option} {name!r:.80} does not exist: use one of {', '.join(known)}"


def _started(asked: Asked) -> Worker:
    worker = Worker("check", preload=[asked.package])
    try:
        worker.make("checks", f"{__name__}:Checks", **asdict(asked))
    except WorkerError:
        worker.close()
        raise
    return worker
